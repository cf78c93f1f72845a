"""What plans communicate and allocate when they run with PyTorch's fake process group.

In a process of its own, because it makes the default process group a fake one. Collectives return at once, so this shows
what one rank does, not how long it takes.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright import zoo
from shardwright.cluster import mesh_of, parse_cluster
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.costs.pricing import price
from shardwright.frontend import capture
from shardwright.graph.repeats import block_paths
from shardwright.lowering.collectives import counting
from shardwright.program import Kind, build
from shardwright.runtime.parallelize import parallelize
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.search.options import EVERYTHING
from shardwright.simulator import simulate


def case(
    name: str,
    sizes: dict[str, Any],
    search: str,
    axes: tuple[int, ...],
    recompute: bool = False,
    *,
    measured: bool = True,
) -> dict[str, Any]:
    """What was priced and what was performed of one plan; ``measured``: its memory too."""
    torch.manual_seed(0)  # the same model on every rank
    model, args, kwargs = zoo.build(name, **(dict(zoo.entry(name).small) | sizes))
    graph = capture(model, args, kwargs)
    mesh = mesh_of(parse_cluster(f"local:{math.prod(axes)}"), axes)
    within = EVERYTHING if search == "auto" else restriction(search, len(axes))
    formulation = formulate(graph, mesh, within=within, recompute=block_paths(graph) if recompute else ())
    strategy = formulation.strategy(solve(formulation.problem, time_limit=10).answer)
    parallel = parallelize(model, strategy, args, kwargs, graph=graph)
    timeline = simulate(graph, strategy, mesh, coordinate=parallel.program.flow.place.coordinate)
    optimizer = torch.optim.AdamW(parallel.parameters())

    def step() -> None:
        parallel(*args, **kwargs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    executor = parallel._planned.executor
    executor.log = []
    with counting() as ledger:
        step()
    recorded = [parallel.program.instructions[number] for number in executor.log]
    executor.log = None
    if not measured:
        step()
        return _compared(parallel, timeline, ledger, recorded)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    state = [v for values in optimizer.state.values() for v in values.values() if v.dim()]
    buckets = sum(flat.nbytes for flat in parallel._planned.executor.flats)
    held = buckets + sum(map(_bytes, [*parallel.parameters(), *parallel.buffers(), *state, *args]))
    memory = {"peak": timeline.peak_bytes, "measured": held + peak_of(profiler)}
    return _compared(parallel, timeline, ledger, recorded) | memory


def with_a_fake_group(cases: list[Any]) -> list[dict[str, Any]]:
    """Every case on the first of four ranks of which no other exists."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    return [case(*given) for given in cases]


class Powers(torch.nn.Module):
    """Norms and activations written out in powers, as Hugging Face writes those of Llama, T5 and GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
            x = x + h * torch.tanh(h + 0.04 * h.pow(3))
        return x.square().mean()


def peaks_of_passes(passes: int) -> list[int]:
    """Bytes at the peak of every training step, on the first of four ranks of which no other exists."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    model, x = Powers(), torch.randn(1024, 64)
    graph, mesh = capture(model, (x,)), mesh_of(parse_cluster("local:4"))
    stated = formulate(graph, mesh, within=restriction("data-parallel", 1))
    parallel = parallelize(model, stated.strategy(solve(stated.problem).answer), (x,), graph=graph)
    peaks = []
    for _ in range(passes):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            parallel(x).backward()
            parallel.zero_grad(set_to_none=True)
        peaks.append(peak_of(profiler))
    return peaks


def _compared(parallel: Any, timeline: Any, ledger: Any, recorded: list[Any]) -> dict[str, Any]:
    axis_of = {parallel.mesh.get_group(axis).group_name: axis for axis, _ in parallel.program.strategy.axes}
    return {
        "predicted": {" ".join(key): list(value) for key, value in timeline.stage().priced.communication.items()},
        "performed": {f"{kind} {axis_of[g]}": [n, ledger.bytes[kind, g]] for (kind, g), n in ledger.steps.items()},
        "instructions": [_line(i) for i in timeline.stage().program.instructions] == [_line(i) for i in recorded],
    }


def in_shares(cases: list[tuple[str, str]], shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """On one rank of two real processes: what it performed beside its own program, priced."""
    torch.manual_seed(0)
    return [_in_shares(*case, shares) for case in cases]


def _in_shares(name: str, search: str, shares: tuple[float, ...]) -> dict[str, Any]:
    model, args, kwargs = zoo.build(name, **(dict(zoo.entry(name).small) | {"batch": 8}))
    graph, mesh = capture(model, args, kwargs), mesh_of(parse_cluster("local:2"), (2,))
    formulation = formulate(graph, mesh, within=restriction(search, 1))
    found = formulation.strategy(solve(formulation.problem).answer)
    strategy = replace(found, shares={mesh.axes[0].name: shares})
    uneven = mesh.with_shares(strategy.shares)
    decisions, place = PricedDecisions(uneven), (dist.get_rank(),)
    priced = price(build(graph, strategy, decisions, place, device="cpu", training=True), uneven)
    parallel = parallelize(model, strategy, args, kwargs, graph=graph, decisions=decisions)
    executor = parallel._planned.executor
    executor.log = []
    with counting() as ledger:
        parallel(*args, **kwargs).backward()
    axis_of = {group: axis for axis, group in parallel.groups.items()}
    recorded = [parallel.program.instructions[number] for number in executor.log]
    return {
        "predicted": {key: tuple(value) for key, value in priced.communication.items()},
        "performed": {(kind, axis_of[g]): (n, ledger.bytes[kind, g]) for (kind, g), n in ledger.steps.items()},
        "priced": [_line(i) for i in priced.program.instructions],
        "recorded": [_line(i) for i in recorded],
        "operators": [_cut_call(parallel.program, i) for i in recorded if i.kind is Kind.OPERATOR],
    }


def _cut_call(program: Any, instruction: Any) -> str:
    """An operator with the shapes that this rank calls it with."""
    flow = program.flow
    node = flow.nodes[instruction.node]
    return f"{node.op.name} {[flow.values[v].local.shape for v in node.inputs]}"


def _line(instruction: Any) -> tuple[Any, ...]:
    """What is the same in the program that was priced and in what was performed: all but the numbers of values."""
    return (*instruction[:4], instruction.after, instruction.module, instruction.node, *instruction[10:15])


def _bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.itemsize


def allocated_over(profiler: Any) -> list[int]:
    """Bytes allocated and not yet freed after every allocation and release, of what was allocated under the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    return list(itertools.accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda e: e["ts"])))


def peak_of(profiler: Any) -> int:
    """The most of them."""
    return max([0, *allocated_over(profiler)])
