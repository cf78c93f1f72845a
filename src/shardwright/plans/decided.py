"""What was decided about routes and sums, as it stands in a plan's file: one line for each route, readable and diffable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.errors import PlanError
from shardwright.operators.rules import Need, Window
from shardwright.plans.layouts import layout_from, layout_text, needs_from
from shardwright.program import Sizes, Written
from shardwright.program.steps import Route, Step

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


def routes_text(decisions: Written) -> list[dict[str, Any]]:
    """Every route as a JSON value."""
    found = []
    for (shape, dtype, source, target, grad), route in decisions.routes.items():
        ways = [tuple(_step_text(step) for step in way) for way in route]
        text = RouteText(shape, dtype, tuple(layout_text(source)), tuple(layout_text(target)), grad, ways[0], ways[1])
        found.append(asdict(text))
    return found


def nests_text(decisions: Written) -> list[dict[str, Any]]:
    return [
        {"elements": elements, "itemsize": itemsize, "axes": list(axes), "scattered": list(scattered)}
        for (elements, itemsize, axes), scattered in decisions.nests.items()
    ]


def decisions_from(sizes: Sizes, routes: Sequence[RouteText], nests: Sequence[NestText], axes: int) -> Written:
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
    return Written(sizes, table, sums)


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
