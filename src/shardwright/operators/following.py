"""How a cut passes through an expression: what every part of it becomes when a loop is split into pieces.

A part either does not depend on the cut (*same* on every piece), has other elements on every piece (*own*), or is an
unreduced *partial* result. Sums of partial results stay partial; where a partial result meets something that is not
linear, the pieces must exchange it; what is added to a partial sum must itself be partial, so that it counts once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwright.operators.indices import loops_of
from shardwright.operators.language import (
    Access,
    Choice,
    Expression,
    Function,
    Number,
    Plus,
    Position,
    Reduction,
    Times,
    accesses,
    parts,
)
from shardwright.operators.rules import Exchange

SAME, OWN = "same", "own"
"""The two states that need no reduction; any other state is the reduction that a partial result still needs."""


class NotSplittable(Exception):  # noqa: N818 - control flow: this cut has no rule
    """The loop cannot be cut."""


@dataclass
class Cut:
    """One candidate: loops cut together, and what was found out about them on the way."""

    loops: frozenset[str]
    partial: set[int] = field(default_factory=set)
    """Positions of the inputs that must come as unreduced sums."""
    exchanges: dict[Expression, Exchange] = field(default_factory=dict)
    positional: bool = False
    may_exchange: bool = True
    dtype: str = "float32"


def follow(expression: Expression, cut: Cut) -> str:
    """The state of an expression under a cut; exchanges and partial inputs are noted in ``cut``."""
    if isinstance(expression, Number):
        return SAME
    if isinstance(expression, Position):
        if any(loop.name in cut.loops for loop in loops_of(expression.of)):
            cut.positional = True
            return OWN
        return SAME
    if isinstance(expression, Access):
        if expression.tensor.position in cut.partial:
            return "sum"
        used = (loop.name for index in expression.index if index is not None for loop in loops_of(index))
        return OWN if any(name in cut.loops for name in used) else SAME
    if isinstance(expression, Plus):
        return _follow_plus(expression, cut)
    if isinstance(expression, Times):
        left, right = follow(expression.left, cut), follow(expression.right, cut)
        if {left, right} == {"sum", SAME}:
            return "sum"
        return _settle(cut, (expression.left, left), (expression.right, right))
    if isinstance(expression, Choice):
        states = [follow(part, cut) for part in parts(expression)]
        if states[0] == SAME and (states[1] == states[2] == "sum"):
            return "sum"
        if states[0] == SAME and "sum" in states[1:]:
            other, state = (expression.no, states[2]) if states[1] == "sum" else (expression.yes, states[1])
            if state == SAME and _make_partial(other, cut):
                return "sum"
        return _settle(cut, *zip(parts(expression), states, strict=True))
    if isinstance(expression, Function):
        return _settle(cut, *((a, follow(a, cut)) for a in expression.arguments))
    if isinstance(expression, Reduction):
        if expression.kind == "each":
            return _settle(cut, (expression.body, follow(expression.body, cut)))
        state = follow(expression.body, cut)
        if state not in (SAME, OWN, expression.kind):
            reduce_now(expression.body, cut, state)
            state = SAME
        if any(loop.name in cut.loops for loop in expression.loops):
            cut.positional = cut.positional or state == SAME  # a count: it depends on the size of the piece
            return expression.kind
        return state
    raise TypeError(f"not an expression: {expression!r}")


def _follow_plus(expression: Plus, cut: Cut) -> str:
    sides = [(side, follow(side, cut)) for side in (expression.left, expression.right)]
    states = {state for _, state in sides}
    if states == {"sum"}:
        return "sum"
    if states == {"sum", SAME}:
        same = next(side for side, state in sides if state == SAME)
        if _make_partial(same, cut):
            return "sum"
    return _settle(cut, *sides)


def _settle(cut: Cut, *operands: tuple[Expression, str]) -> str:
    """The state of a function that is not linear: partial operands are exchanged first."""
    for operand, state in operands:
        if state not in (SAME, OWN):
            reduce_now(operand, cut, state)
    return OWN if any(state == OWN for _, state in operands) else SAME


def reduce_now(expression: Expression, cut: Cut, kind: str) -> None:
    if not cut.may_exchange:
        raise NotSplittable
    while isinstance(expression, Times) and isinstance(expression.left, Number):
        expression = expression.right  # -mean is exchanged together with mean
    free = dict.fromkeys(name for name in _free_loops(expression, frozenset()) if name not in cut.loops)
    trained = kind == "sum" and any(access.tensor.grad for access in accesses(expression))
    cut.exchanges.setdefault(expression, Exchange(kind, tuple(free), cut.dtype, backward=int(trained)))


def _free_loops(expression: Expression, bound: frozenset[str]) -> Iterable[str]:
    if isinstance(expression, Access):
        for index in expression.index:
            if index is not None:
                yield from (loop.name for loop in loops_of(index) if loop.name not in bound)
    elif isinstance(expression, Position):
        yield from (loop.name for loop in loops_of(expression.of) if loop.name not in bound)
    if isinstance(expression, Reduction):
        bound = bound | {loop.name for loop in expression.loops}
    for part in parts(expression):
        yield from _free_loops(part, bound)


def _make_partial(expression: Expression, cut: Cut) -> bool:
    """Turn a term that is the same everywhere into an unreduced sum, if it is linear in some of its inputs."""
    for position in sorted({a.tensor.position for a in accesses(expression) if a.tensor.floating}):
        trial = Cut(cut.loops, cut.partial | {position}, may_exchange=False)
        try:
            if follow(expression, trial) == "sum":
                cut.partial |= trial.partial
                return True
        except NotSplittable:
            continue
    return False
