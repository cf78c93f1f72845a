"""What a call costs that differs from the planned one: GPT-2 small, first and second call of every kind.

    python bench/new_calls.py

Two processes are planned for and one of them is looked at (PyTorch's fake process group: nothing is sent), because what is
measured is the making of a program, which every rank does by itself. CPU seconds of the process, so that a busy machine
counts for little; nothing is computed, so that the second column is the recognition of a call alone.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize

ROWS, LENGTH = 8, 512


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.zeros(rows, length, dtype=torch.long),
        "labels": torch.zeros(rows, length, dtype=torch.long),
    }


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = GPT2LMHeadModel(GPT2Config())
    graph = capture(model, (), tokens(ROWS, LENGTH))
    options = Options(search="fsdp", baselines=(), fewer_devices=False)
    parallel = parallelize(model, plan_graph(graph, parse_cluster("local:2"), options), graph=graph)
    calls = {
        "fewer rows": tokens(6, LENGTH),
        "shorter": tokens(ROWS, 384),
        "both": tokens(3, 128),
        "a mask": tokens(ROWS, LENGTH) | {"attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long)},
        "no labels": {"input_ids": tokens(ROWS, LENGTH)["input_ids"]},
        "evaluation": tokens(ROWS, LENGTH),
    }
    print(
        f"GPT-2 small, planned for {ROWS} rows of {LENGTH} tokens; CPU seconds of one process, torch {torch.__version__}"
    )
    print(f"{'call':<12} {'first':>8} {'second':>10}")
    for name, kwargs in calls.items():
        parallel.train(name != "evaluation")
        seconds = []
        for _ in range(2):
            started = time.process_time()
            parallel._programs.find((), kwargs)
            seconds.append(time.process_time() - started)
        print(f"{name:<12} {seconds[0]:>8.2f} {seconds[1]:>10.6f}", flush=True)


if __name__ == "__main__":
    main()
