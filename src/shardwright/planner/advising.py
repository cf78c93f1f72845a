"""What would make a plan's job faster that is the user's to change: each change simulated, under the plan as it is.

The captured graph is changed where that can be done in it: extents of weights that fill no whole tiles of a tensor core are
padded, float32 becomes bfloat16. More rows need the model built again (``graph_at``). Nothing is searched: the same splits
run the changed job, and a new search may find faster ones for it. The last line says what binds next: of devices, host and
links whichever, twice as fast, gives most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from shardwright.errors import ShardwrightError
from shardwright.frontend.replay import values_of
from shardwright.graph import Atom, Graph
from shardwright.operators import analyse
from shardwright.plans import Plan
from shardwright.search.limits import limit_of
from shardwright.simulator import WhatIf, simulate_plan
from shardwright.simulator.what_if import link_names
from shardwright.units import bytes_text, seconds_text

TILE = 64
"""Extents are padded to a multiple of this: 128 bytes of a 2-byte dtype, what tensor cores and memory move at once."""
WORTH = 0.01
"""Gains below this share are not told."""
ROOM = 0.5
"""More rows are tried where the step uses less than this share of a device's memory."""
DOUBLINGS = 6
"""The batch is doubled at most so often."""


@dataclass(frozen=True)
class Advice:
    """One change: what to do, the step and the memory with it, and the share of the seconds a row that it saves.

    ``rows`` says by how much the batch grows, so ``gain`` is about equal work.
    """

    kind: str
    change: str
    step_seconds: float
    memory_bytes: float
    gain: float
    fits: bool = True
    rows: int = 1

    def text(self) -> str:
        """The change in a sentence.

        >>> Advice("batch", "Double the batch", 0.3, 2e9, 0.25, rows=2).text()
        'Double the batch: 25 % fewer seconds a row (a step 300 ms, 2 GB a device).'
        """
        what = f"{100 * self.gain:.{0 if self.gain >= 0.1 else 1}f} % fewer seconds a row"
        room = bytes_text(self.memory_bytes) + " a device" + ("" if self.fits else ", more than there are")
        return f"{self.change}: {what} (a step {seconds_text(self.step_seconds)}, {room})."

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "text": self.text()}


def advise(
    plan: Plan, graph: Graph | None = None, graph_at: Callable[[int], Graph] | None = None
) -> tuple[Advice, ...]:
    """What the user could change, the largest gain first; what binds next comes last.

    ``graph_at(factor)`` gives the model captured with so many times the rows; without it, more rows are not tried.

    >>> [advice.kind for advice in advise(plan)]                                                  # doctest: +SKIP
    ['dtype', 'padding', 'bottleneck']
    """
    graph = plan.graph() if graph is None else graph
    now = simulate_plan(plan, graph)
    limit = limit_of(plan.meshes[0].device, plan.asked.memory_limit)

    def told(kind: str, change: str, other: Graph, rows: int = 1, what_if: WhatIf | None = None) -> Advice | None:
        try:
            then = simulate_plan(plan, other, what_if=what_if)
        except (ShardwrightError, KeyError, ValueError):
            return None  # the plan's splits do not fit the changed model
        gain = 1 - then.seconds / (rows * now.seconds)
        return Advice(kind, change, then.seconds, then.peak_bytes, gain, then.peak_bytes <= limit, rows)

    found = [told("padding", change, other) for change, other in _padded(graph, plan)]
    found += [told("dtype", change, other) for change, other in _in_bfloat16(graph, plan)]
    found.append(_more_rows(told, graph, now.peak_bytes / limit, graph_at))
    faster = [
        told("bottleneck", f"Next bottleneck: {what}; twice as fast", graph, 1, one) for what, one in _hardware(plan)
    ]
    binding = max(filter(None, faster), key=lambda advice: advice.gain, default=None)
    worth = sorted((one for one in found if one is not None and one.gain >= WORTH), key=lambda one: -one.gain)
    return (*worth, *([binding] if binding is not None and binding.gain >= WORTH else []))


def _padded(graph: Graph, plan: Plan) -> Iterator[tuple[str, Graph]]:
    """Extents of weights in products, each padded to whole tiles, where the model's code can run with that."""
    if plan.meshes[0].device.kind != "cuda":
        return
    extents: Counter[int] = Counter()
    for op in graph.ops:
        if analyse(op, graph.tensors).kind == "matmul":
            for name in set(op.inputs) & set(graph.parameter_of):
                extents.update(dict.fromkeys(graph.tensors[name].shape, graph.tensors[name].elements))
    given = {extent for one in graph.inputs if one.tensor is not None for extent in graph.tensors[one.tensor].shape}
    for extent, _ in extents.most_common():
        padded = -(-extent // TILE) * TILE
        if extent > TILE and extent not in given and padded != extent:
            other = _with_extent(graph, extent, padded)
            if _runs(other):
                yield f"Pad {extent:,} ({_whose(graph, extent)}) to {padded:,}, a multiple of {TILE}", other


def _whose(graph: Graph, extent: int) -> str:
    """The module whose weight has this extent."""
    return next(p.paths[0] for p in graph.parameters if extent in graph.tensors[p.tensor].shape)


def _with_extent(graph: Graph, extent: int, padded: int) -> Graph:
    """The graph with another extent wherever this one stands, in shapes and in arguments."""

    def value(one: Any) -> Any:
        if isinstance(one, tuple):
            return tuple(map(value, one))
        return padded if isinstance(one, int) and not isinstance(one, bool) and one == extent else one

    tensors = {
        name: replace(tensor, shape=tuple(padded if n == extent else n for n in tensor.shape))
        for name, tensor in graph.tensors.items()
    }
    ops = [replace(op, args=value(op.args), kwargs=tuple((k, value(v)) for k, v in op.kwargs)) for op in graph.ops]
    return replace(graph, tensors=tensors, ops=tuple(ops))


def _runs(graph: Graph) -> bool:
    """Whether the operators, run without data, make tensors of the shapes the graph says."""
    meta = torch.device("meta")
    held = {c.tensor for c in graph.constants}
    given = {
        name: torch.empty(graph.tensors[name].shape, dtype=getattr(torch, graph.tensors[name].dtype), device=meta)
        for name in graph.sources
        if name not in held
    }
    try:
        with torch.no_grad():
            made = values_of(graph, given, meta)
    except Exception:  # any operator may refuse, each in its own way
        return False
    return all(tuple(made[name].shape) == tensor.shape for name, tensor in graph.tensors.items() if name in made)


def _in_bfloat16(graph: Graph, plan: Plan) -> Iterator[tuple[str, Graph]]:
    device = plan.meshes[0].device
    floats = [graph.tensors[p.tensor].dtype for p in graph.parameters]
    if floats.count("float32") <= len(floats) / 2 or device.peak("bfloat16") <= device.peak("float32"):
        return

    def value(one: Any) -> Any:
        if isinstance(one, tuple):
            return tuple(map(value, one))
        return Atom("dtype", "bfloat16") if one == Atom("dtype", "float32") else one

    tensors = {n: replace(t, dtype="bfloat16" if t.dtype == "float32" else t.dtype) for n, t in graph.tensors.items()}
    ops = [replace(op, args=value(op.args), kwargs=tuple((k, value(v)) for k, v in op.kwargs)) for op in graph.ops]
    if not any(graph.tensors[c.tensor].dtype == "float32" for c in graph.constants):
        yield (
            "Compute in bfloat16 (other numbers: its 8 bits of mantissa)",
            replace(graph, tensors=tensors, ops=tuple(ops)),
        )


def _more_rows(
    told: Callable[..., Advice | None], graph: Graph, used: float, graph_at: Callable[[int], Graph] | None
) -> Advice | None:
    """The largest batch of a few doublings that fits, where it pays."""
    best, names = None, [op.name for op in graph.ops]
    for doubling in range(1, DOUBLINGS + 1) if graph_at is not None and used < ROOM else ():
        factor = 2**doubling
        other = graph_at(factor) if graph_at is not None else graph
        if [op.name for op in other.ops] != names:
            break
        one = told("batch", f"{factor} times the batch ({100 * used:.0f} % of the memory is used)", other, factor)
        if one is None or not one.fits:
            break
        best = one
    return best


def _hardware(plan: Plan) -> Iterator[tuple[str, WhatIf]]:
    yield "computation on the devices", WhatIf(device_speed=2.0)
    yield "the host, which issues too slowly (larger batches, compiled steps)", WhatIf(host_speed=2.0)
    for name in link_names(plan):
        yield f"the links of {name}", WhatIf(link_rates={name: 2.0})
