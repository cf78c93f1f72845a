"""What prices say of the work that moves with shares and of that which does not.

Operators that an axis does not cut (norms and losses beside cut heads) are done by each of its ranks whatever its share; so
is, in a pipeline, what stands before the first block and after the last. How much that is follows from the prices of the
program's instructions: only their ratio counts, so that even a roughly calibrated machine tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.cluster import Mesh
from shardwright.costs.pricing import price
from shardwright.errors import ShardwrightError
from shardwright.graph import Op
from shardwright.program import Program
from shardwright.program.dataflow import Compute


def uncut_part(program: Program, mesh: Mesh, axis: int, rows: Sequence[int]) -> float:
    """Seconds of operators that an axis does not cut, in those of one of this rank's rows (or parts)."""
    place = program.flow.place.coordinate[axis]
    return _ratio(program, mesh, lambda node: node.split[axis] is not None) * rows[place]


def outside_part(program: Program, mesh: Mesh, inside: Callable[[Op], bool], blocks: int) -> float:
    """Seconds of operators outside of blocks, in those of one of this rank's blocks."""
    return _ratio(program, mesh, lambda node: inside(node.op)) * blocks


def _ratio(program: Program, mesh: Mesh, moves: Callable[[Compute], bool]) -> float:
    """Seconds of operators that stay over those of operators that move; none where nothing has a price."""
    stays = goes = 0.0
    named = zip(mesh.axes, program.strategy.axes, strict=True)  # a strategy may call its axes otherwise
    mesh = replace(mesh, axes=tuple(replace(axis, name=name) for axis, (name, _) in named))
    try:
        events = price(program, mesh).events
    except ShardwrightError:
        return 0.0  # an estimate that steps will mend
    for event in events:
        node = program.flow.nodes[event.node] if event.node >= 0 else None
        if isinstance(node, Compute):
            if moves(node):
                goes += event.seconds
            else:
                stays += event.seconds
    return stays / goes if goes > 0 else 0.0
