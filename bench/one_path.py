"""Which functions a training run on one mesh executes that one of a pipeline does not, and the other way round.

    python bench/one_path.py [--json]

A plan is its stages, so both should go one path: the same model is planned as fsdp, simulated, drawn as a page and trained
on four processes (five steps, each of a smaller batch and a whole one, and an evaluation), once on one mesh and once in two
stages of two with 1F1B; every function of the packages below that was entered is noted. What only one of them entered is
listed with its reason in ``tests/runtime/test_one_path.py``. Counts go by package; the names follow.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import shardwright
from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, Pipelining, plan_graph, plan_pipeline
from shardwright.plans import Plan
from shardwright.reports.page import plan_page
from shardwright.runtime import parallelize
from shardwright.runtime.launch import run_locally
from shardwright.simulator import simulate_plan

ROOT = Path(shardwright.__file__).parent
STEPS = 5
"""More than it takes until backward passes are traced."""
PACKAGES = ("program", "runtime", "simulator", "planner", "reports")


class Layers(torch.nn.Module):
    """Four layers and a loss, so that a schedule may go back before the last pass forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return torch.nn.functional.mse_loss(x, y)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 16, generator=generator), torch.randn(32, 16, generator=generator)


def entered(body: Callable[[], Any]) -> tuple[Any, set[str]]:
    """What ``body`` gives, and the functions of the packages that it entered."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            if path.startswith(str(ROOT)):
                inside = path[len(str(ROOT)) + 1 :].removesuffix(".py")
                if inside.split("/")[0] in PACKAGES and "<" not in frame.f_code.co_name:
                    found.add(f"{inside}:{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        return body(), found
    finally:
        sys.setprofile(None)


def planned(stages: bool) -> Plan:
    # Prices from a data sheet: those measured on this machine would decide which nests of sums a plan has.
    graph, cluster = capture(Layers(), example()), parse_cluster("4xV100")
    options = Options("fsdp", baselines=(), fewer_devices=False, max_axes=1)
    return (
        plan_pipeline(graph, cluster, Pipelining(2, 2, "1f1b"), options)
        if stages
        else plan_graph(graph, cluster, options)
    )


def trained(text: str) -> list[str]:
    """The functions that training and an evaluation enter on any rank; every step adds up the gradients of two batches, the
    first of which is smaller, as the last of an epoch is."""
    from shardwright.plans import from_json

    torch.manual_seed(0)
    model, batch, plan = Layers(), example(), from_json(text)

    def run() -> None:
        parallel = parallelize(model, plan, batch)
        optimizer = torch.optim.AdamW(parallel.parameters())
        for _ in range(STEPS):
            with parallel.no_sync():
                parallel(*(x[: len(x) // 2] for x in batch)).backward()
            parallel(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            parallel(*batch)

    found = sorted(entered(run)[1])
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, found)
    return sorted({name for names in every for name in names})


def walked(stages: bool) -> set[str]:
    """Everything from the search to two trained steps."""

    def looked_at() -> str:
        from shardwright.plans import to_json

        plan = planned(stages)
        graph = plan.graph()
        simulate_plan(plan, graph)
        plan_page(plan, graph, why_seconds=60.0)
        return to_json(plan)

    text, found = entered(looked_at)
    return found | set(run_locally(trained, 4, text)[0])


def compared() -> tuple[int, dict[str, list[str]]]:
    """How many functions both enter, and those that only one of them does."""
    mesh, pipeline = walked(False), walked(True)
    return len(mesh & pipeline), {"one mesh": sorted(mesh - pipeline), "1F1B": sorted(pipeline - mesh)}


def main() -> None:
    both, only = compared()
    if "--json" in sys.argv:
        print(json.dumps({"both": both, **only}, indent=1))
        return
    print(f"{both} functions are entered by both.")
    for name, names in only.items():
        counts = Counter(one.split("/")[0] for one in names)
        print(f"{len(names)} only by {name}: " + ", ".join(f"{package} {n}" for package, n in sorted(counts.items())))
        for one in names:
            print(f"  {one}")


if __name__ == "__main__":
    main()
