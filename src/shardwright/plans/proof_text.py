"""The one place where what is proved becomes words: for the terminal, the page and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.plans.plan import Plan
from shardwright.plans.proof import STEP, SUM, Bound, Dropped, Proof
from shardwright.plans.spaces import EVERY_STRATEGY, LIGHT, NOTHING, PIPELINE, SOME, WHOLE, Axes, SearchSpace
from shardwright.search.solution import gap_of
from shardwright.units import seconds_text

RECOMPUTED = {
    NOTHING: "nothing",
    LIGHT: "what is cheap of all blocks",
    WHOLE: "all blocks",
    SOME: "any number of blocks",
}
CUTS = {
    "blocks": "contiguous runs of blocks",
    "ideals": "stages between ideals of the graph's pieces, one for each group of devices",
}
LOOSE = 1.0
"""A step more than twice its bound is not called near it: such a proof says little."""
SHOWN_MESHES = 4
"""More meshes than this are counted, not listed."""


def proof_text(plan: Plan) -> str:
    """What is proved of a plan: of its step, of the work it adds up to, and over which plans.

    >>> print(proof_text(plan))                                                                   # doctest: +SKIP
    Proved: no step is shorter than 41.2 ms (this one is at most 2.0 % above); no bound on the sum. Over all plans …
    """
    proof, prediction = plan.proof, plan.prediction
    step, total, said = proof.step_bound, proof.sum_bound, list[str]()
    if step:
        gap = gap_of(prediction.step_seconds, step)
        this = f"at most {100 * gap:.1f} % above" if gap <= LOOSE else f"{1 + gap:.1f} times that: a loose bound"
        said.append(f"no step is shorter than {seconds_text(step)} (this one is {this})")
    if total:
        known = "optimal" if proof.optimal else f"at most {100 * proof.gap:.2f} % above the optimum"
        said.append(
            f"no plan adds up to fewer than {seconds_text(total)} of work a device (smallest found "
            f"{seconds_text(proof.cost)}, {known}; this plan {seconds_text(prediction.sum_seconds)})"
        )
    where = spaces_text(proof)
    if not said:
        return f"Nothing is proved about {where}." if where else "Nothing is proved."
    said += ["no bound on the step"] * (not step) + ["no bound on the sum"] * (not total)
    return f"Proved: {'; '.join(said)}. Over {where}."


def quality_text(plan: Plan) -> str:
    """In a word or two, how far the step (where that is bounded) or else the sum can be from the best there is."""
    proof, step = plan.proof, plan.prediction.step_seconds
    if proof.step_bound:
        gap = gap_of(step, proof.step_bound)
        return "optimal" if not step else f"within {100 * gap:.2g} %" if gap <= LOOSE else "only loosely bounded"
    if not proof.sum_bound:
        return "nothing proved"
    return "optimal" if proof.optimal else f"within {100 * proof.gap:.2g} %"


def bounded_text(proof: Proof) -> str:
    """What the quality is about; nothing where there is none."""
    return "the step" if proof.step_bound else "the sum of seconds" if proof.sum_bound else ""


def warnings_text(plan: Plan, report: Path | None = None) -> list[str]:
    """What to say of every bound that turned out to be none, and where the ``report`` about it lies."""
    sent = f"the file {report}" if report else "the model, the cluster and the options"
    return [f"{_dropped_text(one)} Please report it with {sent}." for one in plan.proof.dropped]


def proof_document(plan: Plan) -> dict[str, Any]:
    """The proof for JSON: its bounds with their spaces, what follows from them, and the words."""
    proof = plan.proof
    return {
        "step_bound": proof.step_bound,
        "step_gap": gap_of(plan.prediction.step_seconds, proof.step_bound) if proof.step_bound else None,
        "sum_bound": proof.sum_bound,
        "cost": proof.cost,
        "optimal": proof.optimal,
        "gap": proof.gap if proof.sum_bound else None,
        "seconds": proof.seconds,
        "bounds": [{"space": vars(b.space), "quantity": b.quantity, "value": b.value} for b in proof.bounds],
        "text": proof_text(plan),
        "warnings": warnings_text(plan),
    }


def spaces_text(proof: Proof) -> str:
    """Over which plans something is proved, or was to be, and which are not among them."""
    spaces = _spaces(proof.bounds, (STEP, SUM))
    if not spaces:
        return ""
    sums, said = _spaces(proof.bounds, (SUM,)), [_space_text(group) for group in _same_but_meshes(spaces)]
    if sums and len(sums) < len(spaces):
        said = [_space_text(group) for group in _same_but_meshes(sums)]
        further = [space for space in spaces if space not in sums]
        said += [f"the step also over {_space_text(group)}" for group in _same_but_meshes(further)]
    free = [space for space in spaces if not space.given_stages]
    lacking = [] if any(space.search == PIPELINE for space in free) else ["pipelines"]
    lacking = ([] if any(space.faster_share for space in free) else ["unequal shares"]) + lacking
    others = f"; not among them: {', '.join(['other meshes', *lacking, 'ring attention'])}" if free else ""
    return f"{'; and '.join(said)}{others}"


def _spaces(bounds: Iterable[Bound], quantities: Sequence[str]) -> list[SearchSpace]:
    return list(dict.fromkeys(bound.space for bound in bounds if bound.quantity in quantities))


def _same_but_meshes(spaces: Iterable[SearchSpace]) -> list[list[SearchSpace]]:
    """Spaces that differ in their meshes alone are told together."""
    groups: dict[SearchSpace, list[SearchSpace]] = {}
    for space in spaces:
        groups.setdefault(replace(space, meshes=()), []).append(space)
    return list(groups.values())


def _space_text(spaces: Sequence[SearchSpace]) -> str:
    """A space in words; of several that differ in their meshes, all of these."""
    space, meshes = spaces[0], list(dict.fromkeys(mesh for one in spaces for mesh in one.meshes))
    counts = " or ".join(str(count) for count in space.microbatches)
    if space.given_stages:
        these = f"these {space.most_stages} stages" if space.most_stages > 1 else "this stage"
        return f"orders of the passes of {these} and {counts} micro-batches"
    if space.search == PIPELINE:
        return (
            f"pipelines of {counts} micro-batches: {' or '.join(CUTS[cut] for cut in space.cuts)} on sub-meshes of powers "
            "of two (across a border of unlike nodes: recipes, their rows dealt out by speed), splits as priced per mesh, "
            f"seconds summed, in the orders {', '.join(space.orders)} and those of one stage per group of devices that "
            "hold as much as 1f1b or more"
        )
    kind = "all plans" if space.search == EVERY_STRATEGY else f"{space.search} plans only"
    asked = " that keep the pins and prohibitions" if space.pins or space.forbidden else ""
    ways = (SOME,) if SOME in space.recompute else space.recompute
    again = " or ".join(RECOMPUTED[way] for way in ways)
    alike = ", equal blocks alike" if space.alike else ""
    faster = space.faster_share
    shares = f", rows in unequal shares, never fewer for {faster} than in equal ones" if faster else ""
    return (
        f"{kind}{asked} that fit into memory and cut every operator along one loop per axis of {_meshes_text(meshes)}"
        f"{alike}{shares}, {again} recomputed"
    )


def _meshes_text(meshes: Sequence[Axes]) -> str:
    shown = [" x ".join(f"{name} {size}" for name, size in axes) for axes in meshes]
    return " / ".join(shown) if len(shown) <= SHOWN_MESHES else f"{len(shown)} meshes ({shown[0]}, …)"


def _dropped_text(dropped: Dropped) -> str:
    bound = dropped.bound
    where = " x ".join(f"{name} {size}" for name, size in dropped.shape)
    return (
        f"No bound on the {bound.quantity}: that of {dropped.name} on {where} is {dropped.seconds:.9g} s, below the "
        f"{bound.value:.9g} s that were taken for a bound. The plan is not affected; this is a fault of Shardwright's."
    )
