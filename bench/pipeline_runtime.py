"""Our pipeline beside torch's: the same cut of a GPT, the same 1F1B order, two gloo processes, alternating in one run.

Run: ``torchrun --standalone --nproc-per-node 2 bench/pipeline_runtime.py``. Times are of a step (forward, backward,
gradients) on rank 0, medians over rounds in which both runtimes take turns, so that what else the machine does hits both;
``cpu`` are the seconds in which the ranks had a core, which other programs do not change. Memory is what an engine allocates
at the worst moment of its third step, all since the first counted, without parameters, by the allocator's own reports, on
the rank with more of it. ``--profile`` prints where our step's Python goes.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Pipelining, plan_pipeline
from shardwright.runtime import parallelize

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from runtime.performed import allocated_over


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Half(nn.Module):
    """One half of the model: embedding and blocks, or blocks and head."""

    def __init__(self, first: bool, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width) if first else None
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = None if first else nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x if self.embed is None else self.embed(x))
        return x if self.head is None else self.head(x)


class Whole(nn.Module):
    def __init__(self, first: Half, second: Half) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.second(self.first(tokens)), labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def halves(layers: int, width: int, vocab: int) -> tuple[Half, Half]:
    torch.manual_seed(0)
    return Half(True, layers, width, vocab), Half(False, layers, width, vocab)


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Wall seconds until both ranks are through, and seconds on a core of both ranks together."""
    dist.barrier()
    begin, core = time.perf_counter(), time.process_time()
    step()
    used = torch.tensor(time.process_time() - core)
    dist.barrier()
    wall = time.perf_counter() - begin
    dist.all_reduce(used)
    return wall, float(used)


MARK = 777_777


def peak(step: Callable[[], None]) -> int:
    """Bytes at the worst moment of the third step ever, of all that was allocated since the first: with what is kept."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            step()
        torch.empty(MARK, dtype=torch.uint8)
        step()
    over = allocated_over(profiler)
    marked = next(n for n, (a, b) in enumerate(itertools.pairwise(over)) if b - a == MARK)
    return max(over[marked + 2 :])


def most(size: int) -> int:
    found = torch.tensor(float(size))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 2), ("width", 256), ("vocab", 1000), ("batch", 16), ("seq", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), asked.microbatches
    tokens, labels = (torch.randint(asked.vocab, (asked.batch, asked.seq)) for _ in range(2))
    dist.broadcast(tokens, 0), dist.broadcast(labels, 0)
    theirs = halves(asked.layers, asked.width, asked.vocab)[rank]
    order = Schedule1F1B(PipelineStage(theirs, rank, 2, torch.device("cpu")), count, loss_fn=loss_of)

    def torch_step() -> None:
        theirs.zero_grad()
        order.step(tokens) if rank == 0 else order.step(target=labels)

    model = Whole(*halves(asked.layers, asked.width, asked.vocab))
    graph = capture(model, (tokens, labels))
    plan = plan_pipeline(graph, parse_cluster("local:2"), Pipelining(2, count, "1f1b", ["second"]))
    ours = parallelize(model, plan, (tokens, labels), graph=graph)

    def our_step() -> None:
        ours.zero_grad()
        ours(tokens, labels).backward()

    peaks = [most(peak(step)) for step in (our_step, torch_step)]
    for _ in range(5):
        torch_step(), our_step()
    # Labels are all counted and micro-batches equal, so torch's mean of means is right here too.
    prefix = "first." if rank == 0 else "second."
    for name, parameter in theirs.named_parameters():
        mine = ours.get_parameter(prefix + name).grad.to_local()
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-6)
    if asked.profile:
        _profiled(our_step, rank)
    rounds = [(timed(our_step), timed(torch_step)) for _ in range(asked.rounds)]
    found: dict[str, float | int] = {}
    for clock, name in enumerate(("wall", "cpu")):
        pairs = [(mine[clock], other[clock]) for mine, other in rounds]
        found |= {
            f"{who}_{name}": statistics.median(pair[i] for pair in pairs) for i, who in enumerate(("ours", "torch"))
        }
        found[f"{name}_ratio"] = statistics.median(a / b for a, b in pairs)
    found |= {"ours_peak_bytes": peaks[0], "torch_peak_bytes": peaks[1], "peak_ratio": peaks[0] / peaks[1]}
    if rank == 0:
        print(json.dumps({**found, "load": os.getloadavg()[0], **vars(asked)}))
    dist.destroy_process_group()


def _profiled(step: Callable[[], None], rank: int) -> None:
    profiler = cProfile.Profile(time.process_time)
    for _ in range(20):
        profiler.runcall(step)
    if rank == 0:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
