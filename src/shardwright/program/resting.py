"""Which parameters rest in equal parts where a mesh axis cuts in shares, and which in its shares.

A parameter that every operator reads whole along such an axis (fsdp: gathered for use) rests in equal parts, as DTensors and
other people's checkpoints have them. One that some operator reads cut (tensor parallelism) rests as it is read: otherwise a
part of it would travel in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Replicate

from shardwright.graph import Graph, Op
from shardwright.operators import analyse
from shardwright.operators.rules import Need
from shardwright.operators.strategy import Strategy


def in_equal_parts(graph: Graph, strategy: Strategy) -> frozenset[str]:
    """The parameters that rest cut along an axis with shares, and in equal parts all the same."""
    uneven = [axis for axis, (name, _) in enumerate(strategy.axes) if name in strategy.shares]

    def cut(layout: Sequence[Need]) -> bool:
        return any(not isinstance(layout[axis], Replicate) for axis in uneven)

    def read_cut(name: str) -> bool:
        kept = strategy.kept.get(name)
        return (kept is not None and cut(kept)) or any(
            cut(needs) for op in graph.consumers[name] for needs in _needs(graph, op, name, strategy)
        )

    resting = {p.tensor: strategy.resting[p.tensor] for p in graph.parameters if p.tensor in strategy.resting}
    return frozenset(name for name, layout in resting.items() if cut(layout) and not read_cut(name))


def _needs(graph: Graph, op: Op, name: str, strategy: Strategy) -> list[list[Need]]:
    """What an operator needs of one of its inputs, once for every time that it reads it."""
    rules = analyse(op, graph.tensors)
    loops = [
        rules.by_name.get(loop or "") for loop in strategy.splits.get(op.name, ())
    ]  # unknown ones are refused later
    places = [place for place, read in enumerate(op.inputs) if read == name]
    return [[Replicate() if loop is None else loop.inputs[place] for loop in loops] for place in places if loops]
