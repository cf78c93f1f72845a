"""The losses of a loop under a plan, under DDP and on one process: same data, last smaller batch and evaluation included.

    python bench/same_losses.py > bench/measured/same_losses.md

The model and data of ``examples/plain_loop.py``, and a small GPT-2 on the texts of
``examples/language_model_trainer.py``, for two epochs in float64 by AdamW on 2 and 4 processes. Every batch has 16 rows
but the last one of an epoch, which has 4. DDP is given each rank's rows of the same batches (equal counts on every rank,
or its mean of means would be another loss); plans are given whole batches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "examples")]

ROWS, EPOCHS = 16, 2
WAYS = ("DDP", "data-parallel", "fsdp", "megatron")
CASES = ("classifier", "GPT-2")


def case(name: str) -> tuple[Any, Any, Any, Any]:
    """A model in float64, its training and evaluation data, and the loss of a batch."""
    import torch

    torch.manual_seed(0)
    if name == "classifier":
        import plain_loop

        def classified(model: Any, batch: Any) -> Any:
            return torch.nn.functional.cross_entropy(model(batch[0].double()), batch[1])

        return plain_loop.Classifier().double(), plain_loop.points(100, 0), plain_loop.points(40, 1), classified
    import language_model_trainer as texts
    from torch.utils.data import TensorDataset
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=texts.LENGTH, vocab_size=texts.VOCABULARY)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0

    def next_tokens(model: Any, batch: Any) -> Any:
        return model(input_ids=batch[0], labels=batch[0]).loss

    data = [TensorDataset(texts.Counting(count, seed).texts) for count, seed in ((100, 0), (40, 1))]
    return GPT2LMHeadModel(config).double(), *data, next_tokens


def trained(name: str, way: str) -> list[float]:
    """On one rank: the loss of every step and of every evaluation; ``way`` is DDP, a recipe or ``alone``."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    import shardwright

    torch.set_num_threads(1)
    model, train, test, loss_of = case(name)
    ranks = dist.get_world_size()
    if way == "DDP":
        model = DistributedDataParallel(model)
    elif way != "alone":
        first = next(iter(DataLoader(train, ROWS)))
        example = (
            ((first[0].double(),), {}) if name == "classifier" else ((), {"input_ids": first[0], "labels": first[0]})
        )
        plan = shardwright.plan(model, *example, cluster=f"{ranks}xH100", search=way, baselines=(), fewer_devices=False)
        model = shardwright.parallelize(model, plan, *example)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []

    def mine(batch: Any) -> Any:
        return [x.chunk(ranks)[dist.get_rank()] for x in batch] if way == "DDP" else batch

    def noted(loss: Any) -> None:
        value = loss.detach().clone()
        if way == "DDP":
            dist.all_reduce(value)
            value /= ranks
        found.append(float(value))

    for epoch in range(EPOCHS):
        model.train()
        for batch in DataLoader(train, ROWS, shuffle=True, generator=torch.Generator().manual_seed(epoch)):
            optimizer.zero_grad()
            loss = loss_of(model, mine(batch))
            loss.backward()
            optimizer.step()
            noted(loss)
        model.eval()
        with torch.no_grad():
            for batch in DataLoader(test, ROWS):
                noted(loss_of(model, mine(batch)))
    return found


def all_ways(processes: int) -> dict[str, list[float]]:
    """On one rank, everything; Hugging Face casts logits to float32 for the loss, here to float64."""
    from shardwright.verification.prepare import all_double

    with all_double():
        return _all_ways(processes)


def _all_ways(processes: int) -> dict[str, list[float]]:
    ways = {f"{name}, {way}": trained(name, way) for name in CASES for way in WAYS}
    return ways | {f"{name}, alone": trained(name, "alone") for name in CASES if processes == 2}


def main() -> None:
    from shardwright.runtime.launch import run_locally

    print(
        "| loop | processes | way | losses | last loss | last evaluation | largest difference to one process | to DDP |"
    )
    print("|---|--:|---|--:|--:|--:|--:|--:|")
    alone: dict[str, list[float]] = {}
    for processes in (2, 4):
        found = run_locally(all_ways, processes, processes)[0]
        alone |= {name: found[f"{name}, alone"] for name in CASES if processes == 2}
        for name in CASES:
            for way in WAYS:
                mine, true, theirs = found[f"{name}, {way}"], alone[name], found[f"{name}, DDP"]
                apart = [max(abs(a - b) / abs(b) for a, b in zip(mine, other, strict=True)) for other in (true, theirs)]
                print(
                    f"| {name} | {processes} | {way} | {len(mine)} | {mine[-4]:.9f} | {mine[-1]:.9f} "
                    f"| {apart[0]:.1e} | {apart[1]:.1e} |"
                )
                assert max(apart) < 1e-9
    print("\nTwo epochs of 7 steps (the last on 4 rows) and 3 evaluation batches (the last on 8 rows), float64.")


if __name__ == "__main__":
    main()
