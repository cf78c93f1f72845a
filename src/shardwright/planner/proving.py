"""What is proved about a plan, in the user's words: the space, the quantities, and a check that no candidate lies below.

Two quantities are bounded: the seconds of all that one device does in a step, summed, and the step itself. Both bounds are
optima at prices that no execution undercuts (:mod:`shardwright.search.bills`), under a count of memory that leaves things
out but adds none. A bound above a plan that was priced would be no bound: that is checked for all of them, always, and such
a bound is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isfinite

from shardwright.planner.glance import SLACK
from shardwright.planner.outcomes import Bounds, Outcome, mesh_text
from shardwright.planner.trials import Found
from shardwright.plans import Plan, Proof

ROUNDING = 1e-9
"""What sums of many seconds may be off by, relatively."""

OPTIMAL = 1e-6
"""A sum this close to its bound, relatively, is called optimal."""

NO_BOUND = "no bound on the"
"""So begins the warning that a bound was dropped."""


def scope(outcome: Outcome, recomputed: str, constrained: bool) -> str:
    """The space a proof is about, and what is not in it."""
    kind = {"auto": "all plans"}.get(outcome.name, f"{outcome.name} plans only")
    asked = " that keep the pins and prohibitions" if constrained else ""
    shown = [mesh_text(mesh) for mesh in outcome.meshes]
    meshes = " / ".join(shown) if len(shown) <= 4 else f"{len(shown)} meshes ({shown[0]}, …)"
    return (
        f"{kind}{asked} that fit into memory and cut every operator along one loop per axis of {meshes}, equal "
        f"blocks alike, {recomputed}; not among them: other meshes, unequal shares, pipelines, ring attention"
    )


def proof(bounds: Bounds, fitting: Iterable[Found], plan_seconds: float, where: str) -> tuple[Proof, list[str]]:
    """The proof for a plan, from the bounds and all candidates that fit, and a warning for each bound that was dropped."""
    bounds, warnings = uncontradicted(bounds, fitting := tuple(fitting))
    cost = min(found.sum_seconds for found in fitting if found.exact)
    bound = min(bounds.seconds, cost) if isfinite(bounds.seconds) else 0.0
    step = bounds.step if isfinite(bounds.step) else 0.0
    return Proof(cost, bound, cost <= bound * (1 + OPTIMAL), plan_seconds, where, step), warnings


def uncontradicted(bounds: Bounds, fitting: Iterable[Found]) -> tuple[Bounds, list[str]]:
    """The bounds that no candidate which fits lies below; any other becomes zero, which says nothing, with a warning.

    A wrong bound says nothing about the plan itself, so the plan stays.
    """
    warnings = []
    for what, quantity, of in (("seconds", "sum", "sum_seconds"), ("step", "step", "seconds")):
        bound, below = getattr(bounds, what), None
        for found in fitting:
            seconds = getattr(found, of)
            if bound > seconds * (1 + (ROUNDING if found.exact else SLACK)):
                below, bound = below or (found, seconds), 0.0
        if below is not None:
            found, seconds = below
            warnings.append(
                _dropped(quantity, getattr(bounds, what), f"{found.name} on {mesh_text(found.mesh)}", seconds)
            )
            bounds = replace(bounds, **{what: 0.0})
    return bounds, warnings


def kept_bound(bound: float, seconds: float, what: str) -> tuple[float, list[str]]:
    """A bound on the step and no warning; where ``what`` takes fewer ``seconds``, no bound (zero) and a warning."""
    if bound <= seconds * (1 + ROUNDING):
        return bound, []
    return 0.0, [_dropped("step", bound, what, seconds)]


def dropped_bounds(plan: Plan) -> list[str]:
    """The warnings among a plan's notes about bounds that were dropped."""
    return [note for note in plan.notes if note.startswith(NO_BOUND)]


def _dropped(quantity: str, bound: float, what: str, seconds: float) -> str:
    return (
        f"{NO_BOUND} {quantity}: that of {what} is {seconds:.9g} s, below the {bound:.9g} s that were taken for a "
        "bound. The plan is not affected; this is a fault of Shardwright's: please report it with the model, the cluster "
        "and the options."
    )
