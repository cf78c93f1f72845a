"""A model whose weights alone exceed what a process may hold trains on four, from meta and from a checkpoint."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.frontend import capture
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.program import FixedDecisions, Sizes
from shardwright.runtime import parallelize
from shardwright.runtime.checkpoint import save_checkpoint
from shardwright.runtime.launch import run_locally
from shardwright.runtime.materialise import parameters_on_meta

LAYERS, WIDTH, BATCH = 40, 1024, 8
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4


def build() -> torch.nn.Module:
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers)


def keep_size(module: torch.nn.Module) -> None:
    """So that the numbers neither vanish nor explode on their way through all layers."""
    torch.nn.init.normal_(module.weight, std=WIDTH**-0.5)


def limit_memory(extra: int) -> None:
    """From now on this process may map ``extra`` more bytes of private memory than it has."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()  # data + stack
    resource.setrlimit(resource.RLIMIT_DATA, (used + extra, used + extra))


def whole_model_does_not_fit() -> bool:
    try:
        build()
    except (RuntimeError, MemoryError):
        return True
    return False


def trains(folder: str) -> tuple[list[float], list[float], bool]:
    with parameters_on_meta():
        model = build()
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    graph = capture(model, (x.to("meta"),))
    sharded = {name: (Shard(0),) for name in graph.sources}
    strategy = Strategy((("cpu", 4),), {op.name: ("n0",) for op in graph.ops}, sharded, {}, frozenset(sharded))
    torch.randn(WIDTH, WIDTH) @ torch.randn(WIDTH, WIDTH)  # let the libraries allocate what they need once
    dist.barrier()
    limit_memory(int(0.85 * MODEL_BYTES))
    # Gradients on their way are let go of when gloo has sent them, late on a busy machine: few may be under way at once.
    priced = PricedDecisions(Plan.of(graph, strategy).meshes[0])
    decisions = FixedDecisions(otherwise=priced, sizes=Sizes(ahead=2**22, in_flight=2**22))
    parallel = parallelize(model, strategy, graph=graph, initialise=keep_size, decisions=decisions)
    first = train(parallel, x)
    save_checkpoint(folder, 1, parallel)
    before = train(parallel, x)
    del parallel
    gc.collect()
    again = parallelize(model, strategy, graph=graph, weights=f"{folder}/step-1", decisions=decisions)
    return first + before, train(again, x), whole_model_does_not_fit()


def train(model: torch.nn.Module, x: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder: str) -> None:
    for losses, resumed, refused in run_locally(trains, 4, folder):
        assert refused, "the limit is too wide to prove anything"
        assert losses[0] > losses[1] > losses[2] > losses[3]
        assert resumed == losses[2:]


def test_model_larger_than_a_process(tmp_path):
    # In an interpreter of its own: what other tests have left in memory would lie between what is measured here. Large
    # blocks go back to the system when freed, instead of leaving holes that only small ones fit.
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "PYTHONPATH": paths}
    script = f"from runtime.test_memory_limit import main; main({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
