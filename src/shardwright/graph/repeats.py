"""Finds repeated blocks structurally: the N identical layers of a network, without being told where they are.

The operators' signatures (target, arguments, shapes) form a word; a repeated block is a run of that word with a
period, and the wiring must repeat with it: every input is the same outside tensor, the next piece of an outside list,
a fresh parameter of the same shape, or comes from the operator one period later. Runs are found for every period that
occurs between equal neighbours of a signature, longest coverage first. Graphs never change, so what is found is remembered
with the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shardwright.graph.core import Graph, Op, Ref, Value

Answer = TypeVar("Answer")


def remembered(graph: Graph, key: str, find: Callable[[], Answer]) -> Answer:
    """What ``find`` gives, found once per graph (kept beside the graph's own cached properties)."""
    known = graph.__dict__
    if key not in known:
        known[key] = find()
    found: Answer = known[key]
    return found


@dataclass(frozen=True)
class Repeat:
    """``count`` consecutive blocks of ``period`` operators each, the first operator at index ``start``."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


def repeated_blocks(graph: Graph, least: int = 2) -> tuple[Repeat, ...]:
    """Non-overlapping runs of identical blocks, the ones that cover most first.

    A block must occur at least ``least`` times. Blocks of a single operator count too (an unrolled loop of one).
    """
    return remembered(graph, f"_repeated_blocks_{least}", lambda: _find_blocks(graph, least))


def _find_blocks(graph: Graph, least: int) -> tuple[Repeat, ...]:
    signatures = _signatures(graph)
    made_at = {out: i for i, op in enumerate(graph.ops) for out in op.outputs if out is not None}
    fresh = {p.tensor for p in graph.parameters} | {b.tensor for b in graph.buffers}
    runs: list[Repeat] = []
    numbers = np.array(signatures)
    for period in _periods(signatures):
        for i, stop in _alike(numbers, period, period * (least - 1)):
            if any(period % r.period == 0 and r.start <= i and stop + period <= r.stop for r in runs):
                continue  # two blocks taken as one cover less
            while stop - i >= period * (least - 1):
                length = 0
                while i + length < stop and _same_wiring(graph, i + length, period, i, made_at, fresh):
                    length += 1
                count = length // period + 1
                if count >= least:
                    runs.append(Repeat(i, period, count))
                i += max(length, 1)
    runs.sort(key=lambda r: (-(r.count - 1) * r.period, r.period, r.start))
    taken: list[Repeat] = []
    for run in runs:
        if all(run.stop <= t.start or run.start >= t.stop for t in taken):
            taken.append(run)
    return tuple(sorted(taken, key=lambda r: r.start))


def _alike(signatures: np.ndarray, period: int, least: int) -> list[tuple[int, int]]:
    """Longest spans in which every signature equals the one a period later, those of at least ``least`` operators."""
    equal = np.concatenate([[False], signatures[:-period] == signatures[period:], [False]])
    starts, stops = np.flatnonzero(np.diff(equal)).reshape(-1, 2).T
    long = stops - starts >= max(least, 1)
    return list(zip(starts[long].tolist(), stops[long].tolist(), strict=True))


def representatives(graph: Graph) -> Mapping[str, str]:
    """Every operator's name → the name of the operator of the first block that stands for it (itself outside blocks)."""
    return remembered(graph, "_representatives", lambda: _find_representatives(graph))


def _find_representatives(graph: Graph) -> Mapping[str, str]:
    table = {op.name: op.name for op in graph.ops}
    for run in repeated_blocks(graph):
        for index in range(run.start + run.period, run.stop):
            first = run.start + (index - run.start) % run.period
            table[graph.ops[index].name] = graph.ops[first].name
    return table


def _signatures(graph: Graph) -> list[int]:
    numbers: dict[object, int] = {}
    result = []
    for op in graph.ops:
        shapes = tuple((graph.tensors[n].shape, graph.tensors[n].dtype, graph.tensors[n].grad) for n in op.inputs)
        key = (op.target, _anonymous(op.args), tuple((k, _anonymous(v)) for k, v in op.kwargs), shapes, op.grad)
        used = tuple(o is not None for o in op.outputs)
        result.append(numbers.setdefault((key, used), len(numbers)))
    return result


def _anonymous(value: Value) -> Value:
    if isinstance(value, Ref):
        return "·"
    return tuple(_anonymous(v) for v in value) if isinstance(value, tuple) else value


def _periods(signatures: list[int]) -> list[int]:
    """Distances between consecutive occurrences of each signature, the shortest first.

    A block that holds a signature k times shows its period only as the sum of k neighbouring distances, so sums of up
    to eight neighbours are candidates too; rare signatures (each occurs about once a block) are what decides.
    """
    places: dict[int, list[int]] = {}
    for i, signature in enumerate(signatures):
        places.setdefault(signature, []).append(i)
    candidates: dict[int, int] = {}
    for where in places.values():
        for step in range(1, min(9, len(where))):
            for a, b in zip(where, where[step:], strict=False):
                candidates[b - a] = candidates.get(b - a, 0) + 1
    likely = sorted(candidates, key=lambda p: -candidates[p] * p)[:64]
    return sorted(likely)


def _same_wiring(
    graph: Graph, index: int, period: int, start: int, made_at: Mapping[str, int], fresh: set[str]
) -> bool:
    """Whether operator ``index`` and the one a period later read alike."""
    here: Op = graph.ops[index]
    later: Op = graph.ops[index + period]
    for a, b in zip(here.inputs, later.inputs, strict=True):
        if a in fresh and b in fresh:
            continue  # each block has its own parameters, or both read one shared parameter
        if a == b and made_at.get(a, -1) < start:
            continue
        at, bt = made_at.get(a, -1), made_at.get(b, -1)
        if at == bt and 0 <= at < start:
            continue  # each block takes its own piece of a list (an unbind over time steps) made before the run
        entry = at < start and bt >= start  # the first block reads what came before the run
        if bt - at != period and not entry:
            return False
    return True


def block_paths(graph: Graph) -> tuple[str, ...]:
    """Module paths of the repeated blocks (``blocks.0``, ``blocks.1``, …): what recomputation is named by.

    Taken from the runs of at least four operators a block; empty where repeats do not coincide with numbered modules.
    """
    paths: dict[str, None] = {}
    for run in repeated_blocks(graph):
        if run.period < 4:
            continue
        for op in graph.ops[run.start : run.stop]:
            parts = op.module.split(".")
            numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
            if numbered is not None:
                paths[".".join(parts[: numbered + 1])] = None
    return tuple(paths)


def span_of(graph: Graph, path: str) -> range:
    """Indices from the first to the last operator of a module: what is computed again when it is recomputed."""
    return remembered(graph, "_spans", lambda: _find_spans(graph)).get(path, range(0))


def _find_spans(graph: Graph) -> dict[str, range]:
    spans: dict[str, range] = {}
    for index, op in enumerate(graph.ops):
        path = op.module
        while True:
            spans[path] = range(spans[path].start if path in spans else index, index + 1)
            if "." not in path:
                break
            path = path.rpartition(".")[0]
    return spans
