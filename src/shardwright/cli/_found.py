"""A plan that was found, as ``shardwright plan`` shows it: the comparison, the proof, and what it does in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwright.cli._show import bytes_text, mesh_text, seconds_text, table, tell
from shardwright.cli._step import stages_document

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.planner.advising import Advice
    from shardwright.plans import Candidate, Plan


COLUMNS = (
    "Simulated steps; memory and bytes sent are a device's; exposed: communicating or waiting for it, nothing else."
)
"""What the columns of plans mean."""


def print_plan(found: Plan, graph: Graph) -> None:
    """The comparison as a table, then sentences."""
    from shardwright.plans.proof_text import proof_text
    from shardwright.reports.in_words import summary_of

    fastest = min(
        (c.prediction.step_seconds for c in found.candidates if c.prediction and c.prediction.fits and c.simulated),
        default=0.0,
    )
    rows = []
    for candidate in found.candidates:
        p = candidate.prediction
        name = "found" if candidate.name == "auto" else candidate.name
        if p is None:
            rows.append([name, "–", "–", "–", "–", "–", "–", f"no: {candidate.note}"])
            continue
        rows.append(
            [
                name,
                mesh_text(candidate.mesh),
                seconds_text(p.step_seconds),
                f"{p.step_seconds / fastest:.2f}×" if fastest else "–",
                bytes_text(p.memory_bytes),
                *sent_texts(candidate),
                fits_text(candidate),
            ]
        )
    heads, legend = ["strategy", "mesh", "step", "ratio", "memory", "sent", "exposed", "fits"], COLUMNS
    if all(row[-1] == "yes" for row in rows):  # which leaves room for the mesh
        heads, rows, legend = heads[:-1], [row[:-1] for row in rows], f"All fit. {COLUMNS}"
    table(
        f"{found.model or 'model'} on {found.cluster.name}",
        heads,
        rows,
        caption=f"{legend} {proof_text(found)} Planned in {found.proof.seconds:.1f} s. Prices: {found.calibration}.",
        spare=("mesh", "sent", "exposed"),
    )
    tell(" ".join(summary_of(found, graph)))
    for note in found.notes:
        tell(note)
    if found.replicated:
        total = sum(seconds for _, _, seconds in found.replicated)
        tell(f"{len(found.replicated)} operators have no rule and run whole on every rank: {seconds_text(total)}.")


def sent_texts(candidate: Candidate) -> list[str]:
    """The bytes that a device sends in a step, and the seconds in which it does nothing else."""
    p = candidate.prediction
    if p is None or not candidate.simulated:
        return ["–", "–"]
    return [bytes_text(p.communication_bytes), seconds_text(p.exposed_seconds)]


def fits_text(candidate: Candidate) -> str:
    """Whether it fits, as far as that is known."""
    if not candidate.simulated:
        return "unknown: by sums, not simulated"
    fits = candidate.prediction is not None and candidate.prediction.fits
    return ("yes" if fits else "no") + (", recomputed" if candidate.note else "")


def plan_document(found: Plan, graph: Graph) -> dict[str, Any]:
    """The same for ``--json``."""
    from shardwright.plans.proof_text import proof_document
    from shardwright.reports.in_words import summary_of

    return {
        "model": found.model,
        "cluster": found.cluster.name,
        "prediction": vars(found.prediction),
        "summary": summary_of(found, graph),
        "proof": proof_document(found),
        "calibration": found.calibration,
        "candidates": [
            {
                "name": c.name,
                "mesh": c.mesh,
                "note": c.note,
                "simulated": c.simulated,
                "prediction": c.prediction and vars(c.prediction),
            }
            for c in found.candidates
        ],
        "replicated": found.replicated,
        "notes": found.notes,
        "serving": found.serving and vars(found.serving),
        **stages_document(found),
    }


def print_advice(advised: Sequence[Advice]) -> None:
    """What is the user's to change, a line for each."""
    if advised:
        tell("Yours to change, simulated under this plan:")
    for one in advised:
        tell(f"- {one.text()}")


def advice_document(advised: Sequence[Advice]) -> dict[str, Any]:
    """The same for ``--json``, where it was asked for."""
    return {"advice": [one.as_dict() for one in advised]} if advised else {}


def print_serving(found: Plan) -> None:
    """What the plan is for, in a sentence."""
    from shardwright.planner.sizing import batch_and_tokens

    serving, seconds = found.serving, found.prediction.step_seconds
    if serving is None:
        return
    rows = batch_and_tokens(found.graph())[0]
    rate = f", {rows / seconds:,.0f} rows a second"
    together = f"{serving.calls} calls at once" if serving.calls > 1 else "one call"
    cache = f" with {serving.cache} positions in the cache" if serving.cache else ""
    tell(
        f"Inference for {serving.objective}: {together}{cache} in {seconds_text(seconds)}{rate}. "
        "Results lie as the plan cuts them; what is asked for whole is put together when first used."
    )
