"""Train a Hugging Face GPT-2 on synthetic text, split as a plan says. Compare with train_gpt2_fsdp.py, written by hand.

With a plan made by ``python examples/train_gpt2.py --plan plan.json``:

    shardwright run plan.json -- examples/train_gpt2.py

or, planning by itself for as many processes as there are:

    torchrun --nproc-per-node 2 examples/train_gpt2.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright

BATCH, LENGTH, VOCAB = 8, 64, 500


def build() -> torch.nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=VOCAB, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    """Counting sequences with a random start: a model learns them in a few hundred steps. Every rank gets the whole."""
    start = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + 3 * torch.arange(LENGTH)) % VOCAB
    return {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoints", default="")
    parser.add_argument("--plan", help="only write a plan for two local processes to this file")
    given = parser.parse_args()
    model = build()
    if given.plan:
        shardwright.plan(model, (), batch(0), cluster="local:2", fewer_devices=False).save(given.plan)
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if "SHARDWRIGHT_PLAN" in os.environ:
        plan = shardwright.Plan.load(os.environ["SHARDWRIGHT_PLAN"])
    else:
        cluster = f"local:{dist.get_world_size()}"
        plan = shardwright.plan(model, (), batch(0), cluster=cluster, fewer_devices=False)
    model = shardwright.parallelize(model, plan, (), batch(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    resumed = shardwright.load_checkpoint(given.checkpoints, model, optimizer) if given.checkpoints else None
    for step in range(resumed["step"] if resumed else 0, given.steps):
        optimizer.zero_grad()
        loss = model(**batch(step)).loss
        loss.backward()
        shardwright.clip_gradients(model, 1.0)
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
        if given.checkpoints and (step + 1) % 50 == 0:
            shardwright.save_checkpoint(given.checkpoints, step + 1, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
