"""What is proved about a plan, in the user's words: the space, the quantities, and a check that no candidate lies below.

Two quantities are bounded: the seconds of all that one device does in a step, summed, and the step itself. Both bounds are
optima at prices that no execution undercuts (:mod:`shardwright.search.bills`), under a count of memory that leaves things
out but adds none. A bound above a plan that was priced would be no bound: that is checked for all of them, always.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from shardwright.errors import ProofError
from shardwright.planner.glance import SLACK
from shardwright.planner.outcomes import Bounds, Outcome, mesh_text
from shardwright.planner.trials import Found
from shardwright.plans import Proof

ROUNDING = 1e-9
"""What sums of many seconds may be off by, relatively."""

OPTIMAL = 1e-6
"""A sum this close to its bound, relatively, is called optimal."""


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


def proof(bounds: Bounds, fitting: Iterable[Found], plan_seconds: float, where: str) -> Proof:
    """The proof for a plan, from the bounds and all candidates that fit.

    Raises
    ------
    ProofError
        When a candidate lies below a bound.
    """
    check(bounds, fitting := tuple(fitting))
    cost = min(found.prediction.sum_seconds for found in fitting if found.exact)
    bound = min(bounds.seconds, cost) if isfinite(bounds.seconds) else 0.0
    step = bounds.step if isfinite(bounds.step) else 0.0
    return Proof(cost, bound, cost <= bound * (1 + OPTIMAL), plan_seconds, where, step)


def check(bounds: Bounds, fitting: Iterable[Found]) -> None:
    """Refuse bounds that a candidate which fits contradicts."""
    for found in fitting:
        slack = ROUNDING if found.exact else SLACK
        p = found.prediction
        for what, bound, seconds in (
            ("sum", bounds.seconds, p.sum_seconds),
            ("step", bounds.step, p.step_seconds),
        ):
            if bound > seconds * (1 + slack):
                raise ProofError(
                    f"The {what} of {found.name} on {mesh_text(found.mesh)} is {seconds:.9g} s, below the bound of "
                    f"{bound:.9g} s that was proved for it.",
                    "This is a fault of Shardwright's: please report it with the model, the cluster and the options.",
                )
