"""Dropout in replayed steps, on one GPU: fresh patterns every step, other ones for other ranks, the same again for a seed.

    python bench/device_dropout.py

One rank of two with PyTorch's fake collectives; the learning rate is nothing, so that losses differ by patterns alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore  # the only way to this backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize

STEPS = 24


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.5), nn.Linear(256, 256), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def losses(seed: int, rank: int) -> tuple[list[float], int]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Model().cuda()
    x = torch.randn(64, 256, device="cuda")
    x[32:] = x[:32]  # both ranks see the same rows, so that only patterns differ
    graph = capture(model, (x,))
    plan = plan_graph(
        graph, parse_cluster("2xH200"), Options(search="data-parallel", baselines=(), fewer_devices=False)
    )
    parallel = parallelize(model, plan, graph=graph, device="cuda")
    torch.manual_seed(seed)
    found = []
    for _ in range(STEPS):
        loss = parallel(x)
        loss.backward()
        parallel.zero_grad()
        found.append(loss.item())
    recorder = parallel._planned.recorder
    dist.destroy_process_group()
    return found, 0 if recorder is None else recorder.replays


def main() -> None:
    (first, replays), (again, _), (other_rank, _), (other_seed, _) = (
        losses(*x) for x in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    eager, replayed = first[: STEPS - replays], first[STEPS - replays :]
    mean = [sum(part) / len(part) for part in (eager, replayed)]
    print(f"{replays} of {STEPS} steps replayed, {len(set(replayed))} different losses among them")
    print(f"mean loss eager {mean[0]:.5f}, replayed {mean[1]:.5f}; the same seed again: {first == again}")
    print(f"equal losses on the other rank {sum(a == b for a, b in zip(first, other_rank, strict=True))}", end="")
    print(f", with another seed {sum(a == b for a, b in zip(first, other_seed, strict=True))}")


if __name__ == "__main__":
    main()
