"""Hugging Face's Trainer with a parallelized model: the losses of one process, evaluation, checkpoints, resuming."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from runtime.features import found, gpt2
from shardwright.runtime import parallelize
from shardwright.verification.prepare import all_double

TEXTS, ROWS, LENGTH, VOCABULARY = 20, 8, 12, 48
"""Two whole batches and one of four rows."""


class Texts(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.texts = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def arguments(folder: str | Path, **kwargs: Any) -> Any:
    common: dict[str, Any] = {"per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS, "use_cpu": True}
    common |= {"num_train_epochs": 2, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "optim": "adamw_torch"}
    common |= {"learning_rate": 1e-2, "max_grad_norm": 0.1, "warmup_steps": 1, "eval_strategy": "epoch"}
    common |= {"save_strategy": "epoch", "eval_do_concat_batches": False, "logging_first_step": True}
    return transformers.TrainingArguments(str(folder), **common | kwargs)


def history(trainer: Any) -> list[tuple[str, float]]:
    """Every loss and norm in the order of the log."""
    names = ("loss", "eval_loss", "grad_norm")
    return [(name, float(entry[name])) for entry in trainer.state.log_history for name in names if name in entry]


@all_double()
def trains(rank: int, kind: str, folder: str) -> None:
    from shardwright.integrations.one_process import one_process
    from shardwright.integrations.trainer import Trainer

    model, graph = gpt2()
    data = {"train_dataset": Texts(TEXTS, 0), "eval_dataset": Texts(11, 1)}
    alone: list[Any] = [None]
    if rank == 0:
        with one_process():
            theirs = transformers.Trainer(
                copy.deepcopy(model), arguments(f"{folder}/theirs", save_strategy="no"), **data
            )
            theirs.train()
            alone = [(history(theirs), {name: x.detach() for name, x in theirs.model.named_parameters()})]
    dist.broadcast_object_list(alone, 0)
    expected, parameters = alone[0]

    plan = found(kind, graph)

    def ours(where: str, **kwargs: Any) -> Any:
        split = parallelize(model, plan, keep=True)
        return Trainer(model=split, args=arguments(where, **kwargs), **data)

    whole = ours(f"{folder}/ours")
    whole.train()
    mine = history(whole)
    assert [name for name, _ in mine] == [name for name, _ in expected]
    for (name, own), (_, true) in zip(mine, expected, strict=True):
        assert own == pytest.approx(true, rel=1e-6 if name == "grad_norm" else 1e-9), (name, mine, expected)
    written = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/ours/checkpoint-6", dtype=torch.float64)
    for name, parameter in parameters.items():
        torch.testing.assert_close(written.get_parameter(name), parameter, rtol=1e-7, atol=1e-9)
    resumed = ours(f"{folder}/ours")
    resumed.train(resume_from_checkpoint=f"{folder}/ours/checkpoint-3")
    assert [value for _, value in history(resumed)] == pytest.approx([value for _, value in mine], rel=1e-9)
    assert resumed.state.global_step == 6 and resumed.is_world_process_zero() == (rank == 0)
