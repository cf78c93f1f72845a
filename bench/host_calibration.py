"""What the runtime's Python costs per parameter, per collective and per exchange of statistics, in dispatches of a view.

    python bench/host_calibration.py plan                           # anywhere: plans the programs
    python bench/host_calibration.py measure [--device cuda]        # torch alone suffices

One rank of eight with the fake process group trains a stack of tiny blocks, so small that the host's time is all there
is: data parallel, FSDP with and without bundles, and tensor parallel with a norm cut across its features. What each takes
beyond the same stack run eagerly, without any plan, and beyond the small operators that a cut norm consists of, is explained
by how many parameters, collectives, exchanges and travelling parameters or gradients its simulated step has (least squares,
no negative costs). All are timed in turn with the yardstick; a view is what it takes on the same host. The result is what
``shardwright.costs.host_runtime.RUNTIME`` holds. No model of the accuracy benchmark takes part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from torch import Tensor, nn

import fake_rank

PLANS = Path(__file__).resolve().parent / "measured" / "host_plans"
WIDTH, BATCH, WORLD = 32, 16, 8
QUANTITIES = ("step", "parameter", "collective", "exchange", "traveller")
DEPTHS = (4, 16)
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


def counts(graph: Any, plan: Any) -> list[int]:
    """Steps (one), parameters, collectives, exchanges and travelling parameters or gradients of a simulated step."""
    from shardwright.simulator import simulate_plan

    events = simulate_plan(plan, graph).ranks[0].events
    exchanges = sum(event.kind == "exchange" for event in events)
    collectives = sum(bool(event.collective) for event in events) - exchanges
    travellers = sum(event.travellers for event in events)
    return [1, len(graph.parameters), collectives, exchanges, travellers]


def inside(graph: Any, plan: Any) -> list[tuple[str, tuple[int, int, int, int]]]:
    """The operators that ranks compute with several others, and what those issue."""
    from shardwright.operators.record import measured_name
    from shardwright.program.dataflow import Compute
    from shardwright.simulator import simulate_plan

    nodes = simulate_plan(plan, graph).stage().program.flow.nodes
    computed = [node for node in nodes if isinstance(node, Compute) and node.kernel is not None]
    return [(measured_name(node.op.target), node.footprint.issued) for node in computed]


def _file(name: str, blocks: int) -> Path:
    return PLANS / (name.replace(",", "").replace(" ", "-") + f"-{blocks}.json")


def make_plans() -> None:
    """Plan every program, and note what its simulated step consists of."""
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph

    notes = []
    for blocks, (name, (search, pins)) in itertools.product(DEPTHS, PROGRAMS.items()):
        graph = capture(Stack(blocks), (torch.randn(BATCH, WIDTH),))
        options = Options(search, (), max_axes=1, pins=pins, fewer_devices=False)
        plan = plan_graph(graph, parse_cluster(f"{WORLD}xH200"), options)
        if name == ALONE:  # a bundle that is full at once
            stage = plan.stages[0]
            decisions = replace(stage.decisions, sizes=replace(stage.decisions.sizes, bundle=0))
            plan = replace(plan, stages=(replace(stage, decisions=decisions),))
        plan.save(_file(name, blocks))
        found = counts(graph, plan)
        notes.append({"name": name, "blocks": blocks, "counts": found, "inside": inside(graph, plan)})
        print(f"{name}, {blocks} blocks: {dict(zip(QUANTITIES, found, strict=True))}")
    (PLANS / "notes.json").write_text(json.dumps(notes))


def beyond_operators(inside: list[Any], dispatch: Mapping[str, list[float]]) -> float:
    """Seconds to issue what stands in place of operators, less those operators'."""
    total = 0.0
    mul, view = dispatch["mul"], dispatch["view"]
    for name, (kernels, looks, functions, computed) in inside:
        total += kernels * mul[0] + looks * view[0] + functions * view[1] + computed * (mul[1] - view[1])
        total -= sum(dispatch.get(name, dispatch["sum"]))
    return total


def calibrate(device: torch.device, repeats: int) -> dict[str, Any]:
    """Seconds of every program, and the cost of each quantity in views."""
    from shardwright.cluster.cases_dispatch import dispatch_seconds
    from shardwright.cluster.pace import Yardstick, on_quietest_core
    from shardwright.frontend import capture
    from shardwright.plans import Plan
    from shardwright.plans.plan import Signature
    from shardwright.runtime import parallelize

    torch.set_num_threads(1)
    notes = json.loads((PLANS / "notes.json").read_text())
    fake_rank.join_fake_group(WORLD)
    seconds, beyond = {}, []
    with on_quietest_core():
        yardstick = Yardstick(device)
        dispatch = dispatch_seconds(yardstick)

        def taken(step: Callable[[], None]) -> float:
            for _ in range(5):
                step()
            pairs = yardstick.beside(lambda: fake_rank.timed(step, device.type, 3)[1], repeats)
            return statistics.median(taken / stick for taken, stick in pairs) * sum(yardstick.fastest)

        for blocks in DEPTHS:
            x = torch.randn(BATCH, WIDTH)
            graph = capture(Stack(blocks), (x,))
            x = x.to(device)
            eager = seconds[f"eager, {blocks} blocks"] = taken(training_step(Stack(blocks).to(device), x))
            for note in (note for note in notes if note["blocks"] == blocks):
                # Another PyTorch may fingerprint the same operators differently.
                plan = replace(Plan.load(_file(note["name"], blocks)), signature=Signature.of(graph))
                parallel = parallelize(Stack(blocks), plan, graph=graph, device=device.type)
                found = seconds[f"{note['name']}, {blocks} blocks"] = taken(training_step(parallel, x))
                beyond.append(found - eager - beyond_operators(note["inside"], dispatch))
    view = dispatch["view"][0]
    table = np.array([note["counts"] for note in notes], dtype=float)
    costs = non_negative(table, np.array(beyond) / view)
    explained = dict(zip((f"{n['name']}, {n['blocks']} blocks" for n in notes), table @ costs * view, strict=True))
    return {
        "view": view,
        "seconds": seconds,
        "beyond": dict(zip(explained, beyond, strict=True)),
        "explained": explained,
        "views": dict(zip(QUANTITIES, costs, strict=True)),
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
    parser.add_argument("command", choices=("plan", "measure"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    if asked.command == "plan":
        make_plans()
        return
    found = calibrate(torch.device(asked.device), asked.repeats)
    print(f"one view: {1e6 * found['view']:.2f} µs; {asked.device}, torch {torch.__version__}")
    for name, seconds in found["seconds"].items():
        beyond = f"{1e3 * found['beyond'][name]:8.3f} beyond its operators" if name in found["beyond"] else ""
        text = f"{beyond}, {1e3 * found['explained'][name]:.3f} explained" if beyond else ""
        print(f"{name:28s} {1e3 * seconds:8.3f} ms {text}")
    print("RUNTIME = Runtime(" + ", ".join(f"{q}={v:.1f}" for q, v in found["views"].items()) + ")")


if __name__ == "__main__":
    main()
