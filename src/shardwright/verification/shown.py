"""A graph that also returns what it draws, so that one process can be given the very numbers that a plan drew.

Every operator that draws leaves its numbers among the results; a dropout becomes the operator that returns its mask too
(``native_dropout``), with the same loops, so that a plan's splits mean what they meant. What the plan does is not changed:
its pieces draw as they always do, and a block that is computed again has to find its mask again by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright._torch_compat import with_list_beside
from shardwright.graph import Graph, Op, Ref, Tensor
from shardwright.operators import record
from shardwright.verification.draws import Draws, drawing


@dataclass(frozen=True)
class Shown:
    """A graph whose last results are what its ``operators`` draw."""

    graph: Graph
    operators: tuple[Op, ...]


def shown(graph: Graph, draws: Draws) -> Shown | None:
    """The graph with its draws as further results, ``(what the model returns, [draw, draw, …])``.

    ``None`` where they are not, one by one, those that the model asked for when ``draws`` were written down.
    """
    operators = tuple(map(_with_mask, drawing(graph)))
    if not operators or len(operators) != len(draws.values) or not graph.output_tree:
        return None
    tensors = dict(graph.tensors)
    for op, value, rate in zip(operators, draws.values, draws.rates, strict=True):
        shape = tuple(value.shape)
        if tensors[op.outputs[0] or ""].shape != shape or rate_of(op) not in (rate, None):
            return None
        tensors.setdefault(drawn(op), Tensor(drawn(op), shape, "bool"))
    instead = {op.name: op for op in operators}
    made = replace(
        graph,
        tensors=tensors,
        ops=tuple(instead.get(op.name, op) for op in graph.ops),
        outputs=(*graph.outputs, *(Ref(drawn(op)) for op in operators)),
        output_tree=with_list_beside(graph.output_tree, len(operators)),
    )
    return Shown(made, operators)


def rate_of(op: Op) -> float | None:
    """That of a dropout."""
    return float(op.args[1]) if (how := record(op.target).draws) and how.dropout else None  # type: ignore[arg-type]


def _with_mask(op: Op) -> Op:
    how = record(op.target).draws
    if how is None or not how.dropout:
        return op
    result = op.outputs[0]
    mask = op.outputs[1] if len(op.outputs) > 1 and op.outputs[1] else f"{result}~kept"
    return replace(op, target=how.with_mask, args=(*op.args[:2], True), outputs=(result, mask))


def drawn(op: Op) -> str:
    """The result that holds what an operator drew."""
    name = op.outputs[0] if rate_of(op) is None else op.outputs[1]
    assert name is not None
    return name
