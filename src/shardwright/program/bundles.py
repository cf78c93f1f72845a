"""Which parameters travel together: one description of the bundles that are gathered and scattered, priced and performed.

A parameter that rests cut is gathered before its use, and its gradient is scattered after it. Each collective costs a
latency and the host's time, so parameters that the same block reads travel in one flat tensor, as FSDP's flat parameters do
(Zhao et al., 2023). Packing and unpacking copy every byte and delay the first of them until the last is there, so large
parameters go alone, and bundles end when they are full and where a repeated or a recomputed block begins or ends: no more
than a block is whole at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass

from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths, remembered, span_of
from shardwright.program.decisions import Sizes
from shardwright.program.steps import Route, Step, first_gather, first_scatter


@dataclass(frozen=True)
class Read:
    """A parameter brought from its resting layout to another one for the operator with this index in the graph."""

    tensor: str
    operator: int
    steps: Route


@dataclass(frozen=True)
class Bundles:
    """Reads by their numbers: every read that gathers is in one tuple of ``gathers``, every one that scatters in one of
    ``scatters``; the tuples are ordered by their first members."""

    gathers: tuple[tuple[int, ...], ...]
    scatters: tuple[tuple[int, ...], ...]


def bundles(
    graph: Graph,
    reads: Sequence[Read],
    full: int,
    whole_gradients: Set[str] = frozenset(),
    recomputed: Iterable[str] = (),
) -> Bundles:
    """Which of the reads of a program, given in its order, are gathered together and which gradients scattered together.

    A bundle of ``full`` bytes is full; a parameter with as many travels alone.
    """
    borders = _borders(graph, recomputed)
    there: list[tuple[Hashable, Step] | None] = []
    back: list[tuple[Hashable, Step] | None] = []
    for read in reads:
        dtype, stretch = graph.tensors[read.tensor].dtype, bisect_right(borders, read.operator)
        gather = first_gather(step.kind for step in read.steps.forward)
        scatter = first_scatter(step.kind for step in read.steps.backward)
        step = None if gather is None else read.steps.forward[gather]
        there.append(None if step is None else ((stretch, step.axis, dtype), step))
        step = None if scatter is None or dtype.startswith("complex") else read.steps.backward[scatter]
        whole = read.tensor in whole_gradients
        back.append(None if step is None else ((stretch, step.axis, dtype, step.reduce, whole), step))
    return Bundles(_grouped(there, full), _grouped(back, full))


def _borders(graph: Graph, recomputed: Iterable[str]) -> list[int]:
    """Where in the list of operators blocks begin and end."""
    paths = (*remembered(graph, "_block_paths", lambda: block_paths(graph)), *recomputed)
    return sorted({border for path in paths for border in (span_of(graph, path).start, span_of(graph, path).stop)})


def _grouped(steps: Sequence[tuple[Hashable, Step] | None], full: int) -> tuple[tuple[int, ...], ...]:
    groups: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for number, found in enumerate(steps):
        if found is None:
            continue
        key, step = found
        if step.wire_bytes >= full:
            groups.append([number])
            continue
        members, held = filling.get(key, ([], 0))
        if not members:
            groups.append(members)
        members.append(number)
        held += step.wire_bytes
        filling[key] = ([], 0) if held >= full else (members, held)
    return tuple(map(tuple, groups))


def shares(graph: Graph, recomputed: Iterable[str] = ()) -> dict[str, float]:
    """Which part of a collective's fixed costs each parameter bears where all of them travel; a bundle's add up to one.

    For whoever prices parameters one by one and does not know yet which of them will be gathered.
    """
    full = Sizes().bundle
    borders, places = _borders(graph, recomputed), {op.name: i for i, op in enumerate(graph.ops)}
    stretches: dict[Hashable, dict[str, int]] = {}
    for parameter in graph.parameters:
        meta, readers = graph.tensors[parameter.tensor], graph.consumers[parameter.tensor]
        if readers and meta.bytes < full:
            stretch = bisect_right(borders, min(places[op.name] for op in readers))
            stretches.setdefault((stretch, meta.dtype), {})[parameter.tensor] = meta.bytes
    return {
        tensor: size / min(max(sum(sizes.values()), 1), full)
        for sizes in stretches.values()
        for tensor, size in sizes.items()
    }


def together(steps: Sequence[Step]) -> Step:
    """One step for those of a bundle: all their bytes in one collective."""
    first = steps[0]
    if len(steps) == 1:
        return first
    bytes_in, bytes_out = sum(step.bytes_in for step in steps), sum(step.bytes_out for step in steps)
    return Step(first.kind, first.axis, None, None, bytes_in, bytes_out, first.reduce)
