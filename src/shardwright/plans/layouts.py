"""Placements and layouts as text, ``R``, ``S0``, ``P(sum)``, and ``W0(1,-1,1)`` for a window; and what was decided about
routes between them and sums, one line for each, as it stands in a plan's file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import PlanError
from shardwright.operators.rules import Layout, Need, Placement, Window
from shardwright.program import FixedDecisions, Sizes
from shardwright.program.steps import Route, Step
from shardwright.records import shown

REDUCTIONS = ("sum", "avg", "product", "max", "min")


def placement_text(placement: Need) -> str:
    """``R``, ``S1``, ``P(sum)`` or ``W0(1,-1,1)``.

    >>> placement_text(Shard(1)), placement_text(Window(2, 1, -1, 1))
    ('S1', 'W2(1,-1,1)')
    """
    if isinstance(placement, Window):
        return f"W{placement.dim}({placement.scale},{placement.low},{placement.high})"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return f"P({placement.reduce_op})" if isinstance(placement, Partial) else "R"


def placement_from(text: str) -> Placement:
    """The inverse of :func:`placement_text`, windows apart."""
    if text == "R":
        return Replicate()
    if re.fullmatch(r"S\d{1,3}", text, re.ASCII):
        return Shard(int(text[1:]))
    if text.startswith("P(") and text.endswith(")") and text[2:-1] in REDUCTIONS:
        return Partial(text[2:-1])
    raise PlanError(f"{shown(text)} is not a placement.", "Placements are R, S0, S1, … and P(sum).")


def need_from(text: str) -> Need:
    """The inverse of :func:`placement_text`."""
    found = re.fullmatch(r"W(\d{1,3})\((\d{1,9}),(-?\d{1,9}),(-?\d{1,9})\)", text, re.ASCII)
    return Window(*map(int, found.groups())) if found else placement_from(text)


def layout_text(layout: Sequence[Need]) -> list[str]:
    return [placement_text(p) for p in layout]


def layout_from(texts: Sequence[str]) -> Layout:
    return tuple(placement_from(t) for t in texts)


def needs_from(texts: Sequence[str]) -> tuple[Need, ...]:
    return cast("tuple[Need, ...]", tuple(need_from(t) for t in texts))


KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "zero_pad", "mask", "halo", "halo_reduce")


@dataclass(frozen=True)
class StepText:
    """A step: what, along which mesh axis (by number), which dims, bytes before and after; ``window``: that of the goal."""

    kind: str
    axis: int
    dim: int | None
    to_dim: int | None
    bytes: tuple[int, int]
    reduce: str | None = None
    window: bool = False


@dataclass(frozen=True)
class RouteText:
    """A route from one layout to another, with the way its gradient comes back where there is one."""

    shape: tuple[int, ...]
    dtype: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    grad: bool
    forward: tuple[StepText, ...]
    backward: tuple[StepText, ...]


@dataclass(frozen=True)
class NestText:
    """How many elements of how many bytes are summed along which axes, and along which of these they are scattered."""

    elements: int
    itemsize: int
    axes: tuple[int, ...]
    scattered: tuple[int, ...]


def routes_text(decisions: FixedDecisions) -> list[dict[str, Any]]:
    """Every route as a JSON value."""
    found = []
    for (shape, dtype, source, target, grad), route in decisions.routes.items():
        ways = [tuple(_step_text(step) for step in way) for way in route]
        text = RouteText(shape, dtype, tuple(layout_text(source)), tuple(layout_text(target)), grad, ways[0], ways[1])
        found.append(asdict(text))
    return found


def nests_text(decisions: FixedDecisions) -> list[dict[str, Any]]:
    return [
        {"elements": elements, "itemsize": itemsize, "axes": list(axes), "scattered": list(scattered)}
        for (elements, itemsize, axes), scattered in decisions.nests.items()
    ]


def decisions_from(sizes: Sizes, routes: Sequence[RouteText], nests: Sequence[NestText], axes: int) -> FixedDecisions:
    """The inverse; a step that no mesh of so many axes has is refused, and so is one that its dims do not fit."""
    table = {}
    for text in routes:
        source, target = layout_from(text.source), needs_from(text.target)
        if len(source) != axes or len(target) != axes:
            raise PlanError(f"The plan's route from {text.source} to {text.target} is not for its mesh.", "Plan again.")
        ways = [
            tuple(_step(step, target, len(text.shape), axes) for step in way) for way in (text.forward, text.backward)
        ]
        table[text.shape, text.dtype, source, target, text.grad] = Route(ways[0], ways[1])
    sums = {}
    for nest in nests:
        if not set(nest.scattered) <= set(nest.axes) or any(not 0 <= axis < axes for axis in nest.axes):
            raise PlanError(f"The plan sums along mesh axes {list(nest.axes)}, which it does not have.", "Plan again.")
        sums[nest.elements, nest.itemsize, nest.axes] = nest.scattered
    return FixedDecisions(sizes, table, sums)


def _step_text(step: Step) -> StepText:
    sizes = (step.bytes_in, step.bytes_out)
    return StepText(step.kind, step.axis, step.dim, step.to_dim, sizes, step.reduce, step.window is not None)


def _step(text: StepText, target: Sequence[Need], rank: int, axes: int) -> Step:
    dims = [dim for dim in (text.dim, text.to_dim) if dim is not None]
    if text.kind not in KINDS or not 0 <= text.axis < axes or any(not 0 <= dim < rank for dim in dims):
        raise PlanError(f"The plan's step {text.kind} along mesh axis {text.axis} cannot be.", "Plan again.")
    window = target[text.axis] if text.window else None
    if text.window and not isinstance(window, Window):
        raise PlanError(f"The plan's step {text.kind} along mesh axis {text.axis} has no window.", "Plan again.")
    before, after = text.bytes
    return Step(text.kind, text.axis, text.dim, text.to_dim, before, after, text.reduce, window)  # type: ignore[arg-type]  # looked at above
