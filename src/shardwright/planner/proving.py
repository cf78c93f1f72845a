"""What a search on one mesh proves, as bounds with their space; and the check that no plan of a space lies below its bound.

Two quantities are bounded: the seconds of all that one device does in a step, summed, and the step itself. Both bounds are
optima at prices that no execution undercuts (:mod:`shardwright.search.bills`), under a count of memory that leaves things
out but adds none. A bound above a plan of its space would be no bound: that is checked for every candidate, always, and
such a bound is dropped. It says nothing about the plan itself, so the plan stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import isfinite

from shardwright.caches import cache_folder, say_once
from shardwright.errors import LoweringError, PlanError, ShardwrightError
from shardwright.planner.glance import SLACK
from shardwright.planner.outcomes import Bounds
from shardwright.planner.staging import shape_of
from shardwright.planner.trials import Found
from shardwright.plans import Bound, Plan, Prediction, Proof, SearchSpace
from shardwright.plans.proof import STEP, SUM
from shardwright.plans.proof_text import warnings_text
from shardwright.plans.spaces import LIGHT, NOTHING, PIPELINE, SOME, WHOLE
from shardwright.search.joint.orders import OTHERS, TWO
from shardwright.search.joint.pipelines import JointPlan, Pipelines

ROUNDING = 1e-9
"""What sums of many seconds may be off by, relatively."""


def prove(
    space: SearchSpace, bounds: Bounds, fitting: Iterable[Found], seconds: float, plan_of: Callable[[Found], Plan]
) -> Proof:
    """The bounds on a space that no candidate which fits contradicts; ``plan_of`` makes a plan of one."""
    step, summed = (Bound(space, what, _finite(value)) for what, value in ((STEP, bounds.step), (SUM, bounds.seconds)))
    proof, sums = Proof((step, summed), seconds=seconds), list[float]()
    for found in fitting:
        inside, slack = True, ROUNDING if found.exact else SLACK
        if found.prediction is not None and _below(proof, found.prediction, slack):
            try:
                plan = plan_of(found)
            except (LoweringError, PlanError):  # nothing that could be run
                continue
            proof, inside = checked(proof, plan, found.name, slack), space.contains(plan)
        if inside and found.exact:
            sums.append(found.sum_seconds)
    cost = min(sums, default=summed.value)
    # A bound that is above the smallest sum by rounding alone is that sum.
    within = (replace(b, value=min(b.value, cost)) if b.quantity == SUM else b for b in proof.bounds)
    return replace(proof, bounds=tuple(within), cost=cost)


def summed_proof(searched: Pipelines, best: JointPlan, found: Mapping[str, JointPlan], memory_limit: float) -> Proof:
    """What the joint search proves of all its pipelines by their sums; none that was ``found`` may lie below."""
    space = SearchSpace(
        search=PIPELINE,
        recompute=(NOTHING, LIGHT, WHOLE, SOME),
        memory_limit=memory_limit if isfinite(memory_limit) else None,
        most_stages=max(one.most * (TWO if one.cutting.halves else 1) for one in searched.spaces),
        microbatches=tuple(sorted({one.microbatches for one in searched.spaces})),
        cuts=tuple(dict.fromkeys(one.cutting.between for one in searched.spaces)),
        orders=("1f1b", *OTHERS),
        summed=True,
    )
    bound = Bound(space, STEP, _finite(best.bound_seconds))
    proof = Proof((bound,), seconds=best.search_seconds)
    for name, one in found.items():
        if bound.value > one.step_seconds * (1 + ROUNDING):
            proof = proof.without(bound, name, shape_of(one), one.step_seconds)
            break
    return proof


def checked(proof: Proof, plan: Plan, name: str, slack: float = ROUNDING) -> Proof:
    """The proof without the bounds of which a plan, or a candidate under this ``name`` made one, shows that they are none.

    A bound on sums that a simulated step undercuts was none on that step, but nothing is wrong with it.
    """
    kept = proof
    for bound in _below(proof, plan.prediction, slack):
        if bound.space.contains(plan):
            seconds = getattr(plan.prediction, OF[bound.quantity])
            shape = plan.stages[0].strategy.axes if plan.whole else (("stage", len(plan.stages)),)
            summed = bound.space.summed
            kept = kept.silent(bound) if summed else kept.without(bound, name, shape, seconds)
    if kept.dropped != proof.dropped:
        warn(replace(plan, proof=kept))
    return kept


def warn(plan: Plan) -> None:
    """Say which bounds were dropped, once, and write what is needed to look into it: the plan, its graph, its cluster."""
    folder, path = cache_folder("reports"), None
    if folder is not None:
        path = folder / f"dropped-bound-{plan.signature.fingerprint[:16]}.json"
        try:
            plan.save(path)
        except ShardwrightError:  # a full disk is no reason to have no plan
            path = None
    for text in warnings_text(plan, path):
        say_once(text)


OF = {STEP: "step_seconds", SUM: "sum_seconds"}
"""Where a prediction has each quantity."""


def _below(proof: Proof, prediction: Prediction, slack: float) -> list[Bound]:
    """The bounds that these seconds lie below."""
    return [b for b in proof.bounds if b.value > getattr(prediction, OF[b.quantity]) * (1 + slack)]


def _finite(seconds: float) -> float:
    return seconds if isfinite(seconds) else 0.0
