"""Which stages of a pipeline do the same, up to names: equal blocks, split alike.

A stage between the first and the last of a deep model has the operators of the next, on tensors as large, split and kept as
there. What decides the program of a rank is written down here with the places of tensors and operators instead of their
names; stages of which that is equal, on equal meshes, take as long and hold as much, so one of them is priced for all.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from shardwright.costs.host import modules_entered
from shardwright.graph import Ref
from shardwright.graph.core import Value
from shardwright.graph.repeats import block_paths, remembered, span_of
from shardwright.operators.strategy import Strategy
from shardwright.program.pipeline import Pipeline
from shardwright.program.stages import StageGraph


def doing(pipe: Pipeline, number: int) -> Hashable:
    """What the ranks of a stage do for micro-batches of every size, up to names.

    >>> doing(pipe, 1) == doing(pipe, 2)                                                         # doctest: +SKIP
    True
    """
    strategy = pipe.stages[number].strategy
    named = {name for name, _ in pipe.ties} | pipe.read_by_the_tail  # others ask for these by name
    parts = tuple((size, _part(parts[number], strategy, named)) for size, parts in pipe.parts.items())
    return (strategy.axes, tuple(sorted(strategy.shares.items())), pipe.splits(number), parts)


def _part(part: StageGraph, strategy: Strategy, named: Collection[str]) -> Hashable:
    graph = part.graph
    names = dict.fromkeys((*graph.sources, *(name for op in graph.ops for name in op.outputs if name)))
    place = {name: number for number, name in enumerate(names)}
    tensors = tuple(
        (
            (meta := graph.tensors[name]).shape,
            meta.dtype,
            meta.grad,
            strategy.resting.get(name),
            strategy.kept.get(name),
            name in strategy.regathered,
            name in strategy.whole_gradients,
            name if name in named else "",
        )
        for name in place
    )
    operators = tuple(
        (
            op.target,
            _placed(op.args, place),
            tuple((key, _placed(value, place)) for key, value in op.kwargs),
            tuple(name and place[name] for name in op.outputs),
            op.grad,
            strategy.splits.get(op.name),
        )
        for op in graph.ops
    )
    spans = [(span_of(graph, path), path in strategy.lightly) for path in strategy.recomputed]
    blocks = [span_of(graph, path) for path in remembered(graph, "_block_paths", lambda: block_paths(graph))]
    return (
        tensors,
        operators,
        tuple(modules_entered(graph.ops).values()),
        tuple((span.start, span.stop, lightly) for span, lightly in spans),
        tuple((span.start, span.stop) for span in blocks),
        tuple(place[p.tensor] for p in graph.parameters),
        tuple(place[b.tensor] for b in graph.buffers),
        tuple((place[held], place[new]) for held, new in graph.mutations),
        tuple(place[name] for name in part.received),
        tuple(place[name] for name in part.sent),
        tuple(place[name] for _, name in part.results),
        _placed(graph.outputs, place),
        graph.training,
    )


def _placed(value: Value, place: Mapping[str, int]) -> Hashable:
    """A value of an operator's call, references by their places."""
    if isinstance(value, Ref):
        return place[value.name]
    if isinstance(value, tuple):
        return tuple(_placed(one, place) for one in value)
    return repr(value)
