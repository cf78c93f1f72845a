"""Which instructions draw random numbers, and whether the passes of a program can be recorded and replayed as they are.

A recording on CUDA advances the generators it draws from, but a block that is computed again must draw what it drew before,
which only Python can arrange. The runtime records by this rule and the simulator leaves the host out by it.
"""

from __future__ import annotations

from shardwright.operators.record import draws, record
from shardwright.program.dataflow import Compute
from shardwright.program.instructions import Program


def random_nodes(program: Program) -> list[tuple[int, Compute]]:
    """The nodes that draw random numbers."""
    nodes = enumerate(program.flow.nodes)
    return [(i, n) for i, n in nodes if isinstance(n, Compute) and draws(n.op, n.rules.kind)]


def why_not_recorded(program: Program) -> str:
    """Why the passes of a program cannot be recorded; nothing if they can."""
    again = next((node for number, node in random_nodes(program) if number in program.again), None)
    if again is not None:
        return f"{again.op.name} draws random numbers in a block that is computed again"
    nodes = (node.op for node in program.flow.nodes if isinstance(node, Compute))
    waits = next((op for op in nodes if not record(op.target).recordable), None)
    return "" if waits is None else f"the host waits for what {waits.name} computes"


def can_be_recorded(program: Program) -> bool:
    """Whether the passes of a training step can be replayed."""
    return bool(program.roots) and not why_not_recorded(program)
