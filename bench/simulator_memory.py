"""Predicted against measured peak memory of one training step on one CPU process, for the zoo's models at test sizes.

What is measured: every allocation and release that PyTorch's CPU allocator reports to its profiler during the second AdamW
step of the real model in eager mode, on top of parameters, buffers, inputs and optimizer state. (A dispatch mode would be
no fair witness: under one, autograd never adds gradients in place.)

    python bench/simulator_memory.py [model ...]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.profiler import ProfilerActivity, profile

from shardwright import zoo
from shardwright.cluster import mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.operators.strategy import Strategy
from shardwright.simulator import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from runtime.performed import peak_of


def measured(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Peak bytes of the second training step."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss = model(*args, **kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    state = [v for values in optimizer.state.values() for v in values.values() if v.dim()]
    inputs = [a for a in args if isinstance(a, torch.Tensor)]
    held = sum(t.numel() * t.itemsize for t in [*model.parameters(), *model.buffers(), *state, *inputs])
    return held + peak_of(profiler)


def whole(graph: Any, mesh: Any) -> Strategy:
    """Everything on every device."""
    alike = (Replicate(),) * len(mesh.axes)
    splits = {op.name: (None,) * len(mesh.axes) for op in graph.ops}
    return Strategy(mesh.names, splits, dict.fromkeys(graph.sources, alike))


def row(name: str) -> tuple[int, int]:
    model, args, kwargs = zoo.build(name, **zoo.entry(name).small)
    mesh = mesh_of(parse_cluster("local:1"))
    graph = capture(model, args, kwargs)
    return simulate(graph, whole(graph, mesh), mesh).peak_bytes, measured(model, args, kwargs)


def main() -> None:
    names = sys.argv[1:] or list(zoo.ENTRIES)
    errors = []
    print(f"{'model':<14}{'predicted':>12}{'measured':>12}{'error':>9}")
    for name in names:
        predicted, real = row(name)
        errors.append(predicted / real - 1)
        print(f"{name:<14}{predicted:>12,}{real:>12,}{100 * errors[-1]:>8.2f}%")
    worst = max(errors, key=abs)
    print(f"median |error| {100 * statistics.median(map(abs, errors)):.2f} %, worst {100 * worst:+.2f} %")


if __name__ == "__main__":
    main()
