"""Language modelling with Hugging Face's Trainer, split by a plan: the lines marked ``# +`` are all that was added.

    python examples/language_model_trainer.py --plan plan.json           # once: plan for two local processes
    shardwright run plan.json -- examples/language_model_trainer.py      # train, evaluate, store; run it again to resume

Without the marked lines (``--alone``) the same script trains on one process, with the same losses.
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import shardwright

ROWS, LENGTH, VOCABULARY = 8, 32, 64


class Counting(torch.utils.data.Dataset):
    """Texts that count in steps of three from somewhere; the last batch of 100 has four rows."""

    def __init__(self, count: int, seed: int) -> None:
        starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
        self.texts = (starts + 3 * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="language-model")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--plan", help="only write a plan for two local processes to this file")
    parser.add_argument("--alone", action="store_true", help="one process, nothing split")
    given = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model, kind = GPT2LMHeadModel(config), Trainer
    if given.plan:
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        example = {"input_ids": tokens, "labels": tokens.clone()}
        shardwright.plan(model, (), example, cluster="local:2", fewer_devices=False).save(given.plan)
        return
    if not given.alone:
        kind = shardwright.Trainer  # +
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # +
        model = shardwright.parallelize(model)  # +

    arguments = TrainingArguments(
        given.output,
        per_device_train_batch_size=ROWS,  # of the whole job
        per_device_eval_batch_size=ROWS,
        num_train_epochs=given.epochs,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=5,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = kind(model=model, args=arguments, train_dataset=Counting(100, 0), eval_dataset=Counting(20, 1))
    stored = os.path.isdir(given.output) and any(name.startswith("checkpoint-") for name in os.listdir(given.output))
    trainer.train(resume_from_checkpoint=stored)
    print(f"evaluation loss {trainer.evaluate()['eval_loss']:.6f}", flush=True)


if __name__ == "__main__":
    main()
