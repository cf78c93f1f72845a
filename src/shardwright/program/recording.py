"""Which instructions draw random numbers, and whether the passes of a program can be recorded and replayed as they are.

A recording on CUDA advances the generators it draws from, but a block computed again must draw what it drew before, which
only Python can arrange. What the host waits for (a selection by a mask, a CTC loss) is performed between two parts of a
recording. The runtime records by these rules; the simulator leaves the host out where nothing is between.
"""

from __future__ import annotations

from shardwright.operators.record import draws, record
from shardwright.program.dataflow import Compute
from shardwright.program.instructions import Kind, Program

COMPUTING = (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT)


def random_nodes(program: Program) -> list[tuple[int, Compute]]:
    """The nodes that draw random numbers."""
    nodes = enumerate(program.flow.nodes)
    return [(i, n) for i, n in nodes if isinstance(n, Compute) and draws(n.op, n.rules.kind)]


def why_not_recorded(program: Program) -> str:
    """Why the passes of a program cannot be recorded; nothing if they can."""
    again = next((node for number, node in random_nodes(program) if number in program.again), None)
    if again is not None:
        return f"{again.op.name} draws random numbers in a block that is computed again"
    waits = next((node for _, node in random_nodes(program) if not record(node.op.target).recordable), None)
    return "" if waits is None else f"{waits.op.name} draws random numbers, and the host waits for what it computes"


def performed_between(program: Program) -> frozenset[int]:
    """The instructions for whose results the host waits."""
    nodes = program.flow.nodes
    waits = {n for n, node in enumerate(nodes) if isinstance(node, Compute) and not record(node.op.target).recordable}
    return frozenset(
        number for number, one in enumerate(program.instructions) if one.node in waits and one.kind in COMPUTING
    )


def recorded_whole(program: Program) -> bool:
    """Whether every pass is one recording."""
    return not why_not_recorded(program) and not performed_between(program)


def can_be_recorded(program: Program) -> bool:
    """Whether the passes of a training step are replayed without the host."""
    return bool(program.roots) and recorded_whole(program)
