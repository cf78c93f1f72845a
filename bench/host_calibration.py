"""What the runtime's Python costs per parameter, per collective and per exchange of statistics, in dispatches of a view.

    python bench/host_calibration.py [--blocks 8 --repeats 100]

One rank of eight with the fake process group trains a stack of tiny blocks on the CPU, where the host's time is all there
is: data parallel, FSDP with and without bundles, and tensor parallel with a norm cut across its features. What each takes
beyond the same stack run eagerly, without any plan, and beyond the small operators that a cut norm consists of, is explained
by how many parameters, collectives, exchanges and travelling parameters or gradients its simulated step has (least squares,
no negative costs). In units of one view, timed in turn with the programs, the result carries over to other hosts (a view is
Python and dispatch on every device, and calibration times it); it is what ``shardwright.costs.host_runtime.RUNTIME`` holds.
No model of the accuracy benchmark takes part.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from torch import Tensor, nn

import fake_rank

WIDTH, BATCH, WORLD = 32, 16, 8
QUANTITIES = ("parameter", "collective", "exchange", "traveller")
ALONE = "fsdp, one by one"
"""Every parameter gathered, and its gradient scattered, without others: what bundles save tells the two costs apart."""
PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "data parallel": ("data-parallel", ()),
    "fsdp": ("fsdp", ()),
    ALONE: ("fsdp", ()),
    "tensor parallel": ("megatron", ("blocks.*.up.weight=S0", "blocks.*.down.weight=S1", "blocks.*.norm=i1")),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Stack(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def counts(graph: Any, plan: Any) -> np.ndarray:
    """How many parameters, collectives, exchanges and travelling parameters or gradients a simulated step has."""
    from shardwright.simulator import simulate

    events = simulate(graph, plan.strategy, plan.mesh).events
    exchanges = sum(event.kind == "exchange" for event in events)
    collectives = sum(bool(event.collective) for event in events) - exchanges
    travellers = sum(event.travellers for event in events)
    return np.array([len(graph.parameters), collectives, exchanges, travellers], dtype=float)


def inside(graph: Any, plan: Any, dispatch: Mapping[str, list[float]]) -> float:
    """Seconds of what is issued in place of the operators that ranks compute with several others, less those operators'."""
    from shardwright.costs.kernels_memory import base_name
    from shardwright.costs.walk_nodes import Compute, forward_nodes

    total = 0.0
    for node in forward_nodes(graph, plan.strategy, plan.mesh).nodes:
        if isinstance(node, Compute) and node.kernel is not None:
            kernels, looks, functions = node.footprint.issued
            alone = dispatch.get(base_name(node.op.target), dispatch["sum"])
            total += kernels * dispatch["add"][0] + looks * dispatch["view"][0] + functions * dispatch["add"][1]
            total -= sum(alone)
    return total


def views(calls: int = 1000) -> Callable[[], None]:
    """Many views of a small tensor, as the calibration of devices times them."""
    x = torch.randn(64, 64, requires_grad=True)

    def step() -> None:
        for _ in range(calls):
            x.view(64, 64)

    return step


def in_turn(programs: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of this thread on its core: on a CPU it does all the work itself, and other programs' time is not in them."""
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, step in programs.items():
            began = time.thread_time()
            step()
            taken[name].append(time.thread_time() - began)
    return taken


def calibrate(blocks: int, repeats: int) -> dict[str, Any]:
    """Seconds of every program, their counts, and the cost of each quantity in views."""
    from shardwright.cluster import parse_cluster
    from shardwright.cluster.calibration import dispatch_seconds
    from shardwright.costs import bundles
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph
    from shardwright.runtime import parallelize

    torch.set_num_threads(1)
    dispatch = dispatch_seconds(torch.device("cpu"))
    fake_rank.join_fake_group(WORLD)
    x = torch.randn(BATCH, WIDTH)
    graph = capture(Stack(blocks), (x,))
    programs, rows, within = {"1000 views": views(), "eager": training_step(Stack(blocks), x)}, [], []
    bundle_bytes = bundles.BUNDLE_BYTES
    for name, (search, pins) in PROGRAMS.items():
        bundles.BUNDLE_BYTES = 0 if name == ALONE else bundle_bytes
        options = Options(search, (), max_axes=1, pins=pins, fewer_devices=False)
        plan = plan_graph(graph, parse_cluster(f"{WORLD}xH200"), options)
        programs[name] = training_step(parallelize(Stack(blocks), plan, graph=graph, device="cpu"), x)
        rows.append(counts(graph, plan))
        within.append(inside(graph, plan, dispatch))
    for step in programs.values():
        for _ in range(5):
            step()
    taken = in_turn(programs, repeats)
    middle = {name: statistics.median(seconds) for name, seconds in taken.items()}
    view = middle["1000 views"] / 1000
    beyond = (np.array([middle[name] - middle["eager"] for name in PROGRAMS]) - np.array(within)) / view
    return {
        "view": view,
        "seconds": middle,
        "least": {name: min(seconds) for name, seconds in taken.items()},
        "counts": dict(zip(PROGRAMS, rows, strict=True)),
        "views": dict(zip(QUANTITIES, non_negative(np.stack(rows), beyond), strict=True)),
    }


def non_negative(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares without negative costs: what would be negative is nothing."""
    used = list(range(table.shape[1]))
    while True:
        found = np.linalg.lstsq(table[:, used], wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        used = [u for u, value in zip(used, found, strict=True) if value > 0]
    result = np.zeros(table.shape[1])
    result[used] = found
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=100)
    asked = parser.parse_args()
    found = calibrate(asked.blocks, asked.repeats)
    print(f"one view: {1e6 * found['view']:.2f} µs; torch {torch.__version__}")
    for name, seconds in found["seconds"].items():
        shown = found["counts"].get(name)
        text = "" if shown is None else ", ".join(f"{int(n)} {q}s" for n, q in zip(shown, QUANTITIES, strict=True))
        print(f"{name:16s} {1e3 * seconds:8.3f} ms (least {1e3 * found['least'][name]:.3f})  {text}")
    print("RUNTIME = Runtime(" + ", ".join(f"{q}={v:.1f}" for q, v in found["views"].items()) + ")")


if __name__ == "__main__":
    main()
