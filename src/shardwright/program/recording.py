"""Which instructions draw random numbers, and whether the passes of a program can be recorded and replayed as they are.

A recording on CUDA advances the generators it draws from, but a block that is computed again must draw what it drew before,
which only Python can arrange. The runtime records by this rule and the simulator leaves the host out by it.
"""

from __future__ import annotations

from shardwright.graph import Op
from shardwright.program.dataflow import Compute
from shardwright.program.instructions import Program


def draws(op: Op, kind: str) -> bool:
    """Whether an operator draws random numbers as it stands."""
    name = op.target.split(".")[1]
    if name == "dropout":
        return bool(op.args[1]) and bool(op.args[2])
    if name == "native_dropout":
        return bool(op.args[1]) and op.args[2] is not False
    if name == "scaled_dot_product_attention":
        return bool(op.args[4] if len(op.args) > 4 else op.kwarg("dropout_p", 0.0))
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        numbers = [value for value in op.args if isinstance(value, float)]
        return bool(numbers and numbers[0] and op.kwarg("train", True))
    return kind == "random"


def random_nodes(program: Program) -> list[tuple[int, Compute]]:
    """The nodes that draw random numbers."""
    nodes = enumerate(program.flow.nodes)
    return [(i, n) for i, n in nodes if isinstance(n, Compute) and draws(n.op, n.rules.kind)]


def why_not_recorded(program: Program) -> str:
    """Why the passes of a program cannot be recorded; nothing if they can."""
    again = next((node for number, node in random_nodes(program) if number in program.again), None)
    return "" if again is None else f"{again.op.name} draws random numbers in a block that is computed again"


def can_be_recorded(program: Program) -> bool:
    """Whether the passes of a training step can be replayed."""
    return bool(program.roots) and not why_not_recorded(program)
