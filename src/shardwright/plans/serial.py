"""``plan.json``: readable, diffable, versioned, free of code. One line per operator and per parameter.

Placements are written ``R``, ``S0`` and ``P(sum)``, a split is the list of loops each mesh axis cuts. A pipeline has its
strategies under ``stages``, one line each, and the order of every device's passes under ``schedule``. The last line is the
captured graph, compressed (:mod:`shardwright.plans.packed`), so that a plan can be looked at without running its model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from shardwright.cluster import Cluster, cluster_to_toml, toml_text
from shardwright.cluster.serial import cluster_from
from shardwright.errors import PlanError
from shardwright.files import parse_json
from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.plans.layouts import layout_text, placement_from, placement_text
from shardwright.plans.packed import pack
from shardwright.plans.plan import Asked, Candidate, Plan, Prediction, Proof, Serving, Signature
from shardwright.plans.stages import (
    StageText,
    StrategyText,
    check_pipeline,
    schedule_from,
    stage_from,
    stage_text,
    strategy_from,
    strategy_text,
)
from shardwright.program.microbatches import PER_PIECE, WHOLE
from shardwright.records import read_record, shown

__all__ = ["from_json", "layout_text", "placement_from", "placement_text", "to_json"]

FORMAT = "shardwright-plan-2"
EARLIER = ("shardwright-plan-1",)
"""Formats that are still read: a plan of format 1 leaves routes and sums to the prices of its cluster."""


LINE_BY_LINE = ("candidates", "replicated", "notes", "routes", "nests", "stages", "schedule", "also")
"""Lists whose entries have a line each."""


def to_json(plan: Plan) -> str:
    """The plan as a JSON document; ``from_json(to_json(p)) == p``."""
    strategy = strategy_text(plan.strategy, plan.decisions)
    pipeline: dict[str, Any] = {}
    if plan.stages:
        strategy = {"mesh": strategy["mesh"]}
        orders = plan.schedule.orders if plan.schedule is not None else ()
        pipeline = {
            "microbatches": plan.microbatches,
            "schedule": [" ".join(map(str, order)) for order in orders],
            "stages": [stage_text(stage) for stage in plan.stages],
        }
        if plan.batch_norm != WHOLE:
            pipeline["batch_norm"] = plan.batch_norm
    document: dict[str, Any] = {
        "format": FORMAT,
        "model": plan.model,
        "batch": plan.batch,
        "sequence": plan.sequence,
        "dtype": plan.dtype,
        "search": plan.search,
        "optimizer": plan.optimizer,
        "calibration": plan.calibration,
        "mesh": strategy.pop("mesh"),
        "prediction": vars(plan.prediction),
        "proof": vars(plan.proof),
        "notes": list(plan.notes),
        "asked": vars(plan.asked),
        **({} if plan.serving is None else {"serving": vars(plan.serving)}),
        "candidates": [
            {"name": c.name, "mesh": c.mesh, "note": c.note, "prediction": c.prediction and vars(c.prediction)}
            | ({} if c.simulated else {"simulated": False})
            for c in plan.candidates
        ],
        "replicated": [list(r) for r in plan.replicated],
        "signature": vars(plan.signature),
        **strategy,
        **pipeline,
        "cluster": toml_text.loads(cluster_to_toml(plan.cluster)),
        **({"also": [pack(one) if isinstance(one, Graph) else one for one in plan.also]} if plan.also else {}),
        "graph": pack(plan.captured) if isinstance(plan.captured, Graph) else plan.captured,
    }
    return _readable(document)


def _readable(document: dict[str, Any]) -> str:
    """JSON with one line per entry of the top-level objects: long enough to read, short enough to diff."""
    lines = []
    for key, value in document.items():
        if isinstance(value, dict) and value:
            entries = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{entries}\n }}")
        elif isinstance(value, list) and value and key in LINE_BY_LINE:
            entries = ",\n".join(f"  {json.dumps(v)}" for v in value)
            lines.append(f"{json.dumps(key)}: [\n{entries}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def from_json(text: str, where: str = "the plan") -> Plan:
    """Read a plan; anything malformed is one sentence."""
    data = parse_json(text, where, PlanError)
    found = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found != FORMAT and found not in EARLIER:
        raise PlanError(
            f"{where} is not a plan of format {FORMAT!r} (found {shown(found)}).", "Plan again with this version."
        )
    if "optimiser" in data:  # as files spelled it at first
        data["optimizer"] = data.pop("optimiser")
    return _plan(
        read_record(_Document, data, where=f"{where} is damaged", error=PlanError, remedy="Plan again."), where
    )


@dataclass(frozen=True, kw_only=True)
class _Document(StrategyText):
    """The file, key by key: what is decided about the strategy stands at the top, where people look for it."""

    format: str
    model: str
    batch: int | None
    sequence: int | None
    dtype: str | None
    search: str
    optimizer: str
    calibration: str
    prediction: Prediction
    proof: Proof
    notes: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    replicated: tuple[tuple[str, str, float], ...]
    signature: Signature
    splits: dict[str, tuple[str | None, ...]] = field(default_factory=dict)
    resting: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cluster: dict[str, Any]
    asked: Asked = field(default_factory=Asked)
    graph: str | None = None
    stages: tuple[StageText, ...] = ()
    microbatches: int = 1
    schedule: tuple[str, ...] = ()
    serving: Serving | None = None
    batch_norm: str = WHOLE
    also: tuple[str | None, ...] = ()


def _cluster(data: dict[str, Any]) -> Cluster:
    def self_contained(name: str) -> Any:
        raise PlanError(f"The plan's cluster names the device {name!r} without describing it.", "Plan again.")

    return cluster_from(data, "of the plan", self_contained)


def _plan(data: _Document, where: str) -> Plan:
    stages = tuple(stage_from(stage, f"stage {number} of {where}") for number, stage in enumerate(data.stages))
    strategy, decisions = (stages[0].strategy, stages[0].decisions) if stages else strategy_from(data, where)
    if not stages and not data.splits and data.signature.operators:
        raise PlanError(f"{where} is damaged: it has neither splits nor stages.", "Plan again.")
    schedule = schedule_from(data.schedule, where)
    check_pipeline(stages, data.microbatches, schedule)
    for name, dtype, shape in (*data.signature.inputs, *data.signature.parameters):
        if dtype not in DTYPE_BYTES or any(extent < 0 for extent in shape):
            raise PlanError(f"{where} is damaged: {shown(name)} is {shown(dtype)}{shown(list(shape))}.", "Plan again.")
    if data.batch_norm not in (WHOLE, PER_PIECE):
        raise PlanError(f"{where} is damaged: its batch_norm is {shown(data.batch_norm)}.", "Plan again.")
    return Plan(
        model=data.model,
        signature=data.signature,
        cluster=_cluster(data.cluster),
        strategy=strategy,
        search=data.search,
        optimizer=data.optimizer,
        prediction=data.prediction,
        proof=data.proof,
        calibration=data.calibration,
        candidates=data.candidates,
        replicated=data.replicated,
        notes=data.notes,
        asked=data.asked,
        batch=data.batch,
        sequence=data.sequence,
        dtype=data.dtype,
        captured=data.graph,
        decisions=decisions,
        stages=stages,
        microbatches=data.microbatches,
        schedule=schedule,
        serving=data.serving,
        batch_norm=data.batch_norm,
        also=tuple(one for one in data.also if one is not None),
    )
