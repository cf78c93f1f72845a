"""A stage's process is killed in the middle of a step: every rank ends with an error, and the job goes on where it was.

Real processes that exit when they fail, as those of a launcher do: the ranks that talk to the dead one fail first, then
those that talk to these. They are forked from a server that has imported everything, so that a start costs next to nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.pipelines import halves, pipeline_plan
from runtime.test_pipeline import example
from shardwright.loopback import stay_local
from shardwright.runtime import parallelize
from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint
from shardwright.runtime.launch import forking_context, free_port

RANKS, STEPS, DEADLY, VICTIM = 3, 4, 2, 2
MINUTE = 60.0


class Deadly(list):
    """A log of performed instructions that ends its process in the middle of a backward pass."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def append(self, number: int) -> None:
        if number == self.number:
            os.kill(os.getpid(), signal.SIGKILL)


def batches(args: tuple[torch.Tensor, ...], step: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.roll(x, step, 1) for x in args)


def job(rank: int, port: int, folder: str, killed: bool) -> None:
    """Train to the end from the last checkpoint; the victim dies in one step, if it is told to."""
    torch.set_num_threads(1)
    stay_local()
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=300)
    )
    model, args, graph = example(6)
    parallel = parallelize(model, pipeline_plan(graph, halves(graph, RANKS), 3, "1f1b"), args, graph=graph)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    resumed = load_checkpoint(folder, parallel, optimizer)
    for step in range(resumed["step"] if resumed else 0, STEPS):
        if killed and (rank, step) == (VICTIM, DEADLY):
            for part in parallel._planned.parts.values():
                part.executor.log = Deadly(part.executor.program.backward.start + 2)
        optimizer.zero_grad()
        loss = parallel(*batches(args, step))["loss"]
        loss.backward()
        optimizer.step()
        if rank == 0:
            (Path(folder) / f"loss-{step}").write_text(json.dumps(loss.item()))
        save_checkpoint(folder, step + 1, parallel, optimizer)
    dist.destroy_process_group()


def started(folder: Path, killed: bool) -> list[Any]:
    context, port = forking_context(), free_port()
    processes = [context.Process(target=job, args=(r, port, str(folder), killed), daemon=True) for r in range(RANKS)]
    for process in processes:
        process.start()
    return processes


def test_a_killed_stage_ends_the_job_and_the_restarted_one_goes_on(tmp_path: Path) -> None:
    model, args, _ = example(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batches(args, step))["loss"]
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    processes = started(tmp_path, killed=True)
    try:
        processes[VICTIM].join(180)  # until then it trains
        assert processes[VICTIM].exitcode == -signal.SIGKILL
        died = time.monotonic()
        for process in processes:
            process.join(max(0.0, died + MINUTE - time.monotonic()))
            assert process.exitcode not in (0, None)
        assert not (tmp_path / f"loss-{DEADLY}").exists()
        processes = started(tmp_path, killed=False)
        for process in processes:
            process.join(180)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    losses = [json.loads((tmp_path / f"loss-{step}").read_text()) for step in range(STEPS)]
    assert losses == pytest.approx(expected, rel=1e-10)
