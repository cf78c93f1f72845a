"""``plan.json``: readable, diffable, versioned, free of code. One line per operator and per parameter of every stage.

Placements are written ``R``, ``S0`` and ``P(sum)``, a split is the list of loops each mesh axis cuts. ``schedule`` has a
line for the passes of every device. The last line is the captured graph, compressed (:mod:`shardwright.plans.packed`), so
that a plan can be looked at without running its model.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from math import prod
from typing import Any

from shardwright.cluster import Cluster, cluster_to_toml, toml_text
from shardwright.cluster.serial import cluster_from
from shardwright.errors import PlanError
from shardwright.files import parse_json
from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.plans.layouts import layout_text, placement_from, placement_text
from shardwright.plans.packed import pack
from shardwright.plans.plan import Candidate, Plan, PlanRequest, Prediction, Serving, Signature
from shardwright.plans.proof import Proof
from shardwright.plans.stages import StageText, one_pass, schedule_from, stage_from, stage_text
from shardwright.program.microbatches import PER_PIECE, WHOLE
from shardwright.records import read_record, shown

__all__ = ["from_json", "layout_text", "placement_from", "placement_text", "to_json"]

FORMAT = "shardwright-plan-3"
EARLIER = ("shardwright-plan-1", "shardwright-plan-2")
"""Formats that are still read: plans of format 1 leave routes and sums to the prices of their cluster."""


MOST_DEVICES = 2**20
"""No plan is for more, whatever a file says."""
LINE_BY_LINE = ("candidates", "replicated", "notes", "routes", "nests", "schedule", "also")
"""Lists whose entries have a line each."""


def to_json(plan: Plan) -> str:
    """The plan as a JSON document; ``from_json(to_json(p)) == p``."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "model": plan.model,
        "batch": plan.batch,
        "sequence": plan.sequence,
        "dtype": plan.dtype,
        "search": plan.search,
        "optimizer": plan.optimizer,
        "calibration": plan.calibration,
        "prediction": vars(plan.prediction),
        "proof": asdict(plan.proof),
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
        **({} if plan.batch_norm == WHOLE else {"batch_norm": plan.batch_norm}),
        "schedule": [" ".join(map(str, order)) for order in plan.schedule.orders],
        "stages": [stage_text(stage) for stage in plan.stages],
        "cluster": toml_text.loads(cluster_to_toml(plan.cluster)),
        **({"also": [pack(one) if isinstance(one, Graph) else one for one in plan.also]} if plan.also else {}),
        "graph": pack(plan.captured) if isinstance(plan.captured, Graph) else plan.captured,
    }
    return _readable(document) + "\n"


def _readable(document: dict[str, Any], inside: str = "") -> str:
    """JSON with one line per entry of objects and long lists: long enough to read, short enough to diff."""
    lines, nested = [], f"{inside} "
    for key, value in document.items():
        if key == "stages":
            entries = ",\n".join(f"{nested} {_readable(stage, f'{nested} ')}" for stage in value)
            lines.append(f"{json.dumps(key)}: [\n{entries}\n{nested}]")
        elif isinstance(value, dict) and value:
            entries = ",\n".join(f"{nested} {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{entries}\n{nested}}}")
        elif isinstance(value, list) and value and key in LINE_BY_LINE:
            entries = ",\n".join(f"{nested} {json.dumps(v)}" for v in value)
            lines.append(f"{json.dumps(key)}: [\n{entries}\n{nested}]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return f"{{\n{nested}" + f",\n{nested}".join(lines) + f"\n{inside}}}"


def from_json(text: str, where: str = "the plan") -> Plan:
    """Read a plan; anything malformed is one sentence."""
    data = parse_json(text, where, PlanError)
    found = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found != FORMAT and found not in EARLIER:
        raise PlanError(
            f"{where} is not a plan of format {FORMAT!r} (found {shown(found)}).", "Plan again with this version."
        )
    if found in EARLIER:
        data = _upgraded(data)
    return _plan(
        read_record(_Document, data, where=f"{where} is damaged", error=PlanError, remedy="Plan again."), where
    )


def _upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """A file of an earlier format: one mesh had its strategy at the top, no stages and no schedule."""
    if "optimiser" in data:  # as files spelled it at first
        data["optimizer"] = data.pop("optimiser")
    own = {field.name for field in fields(StageText)}
    top = {key: data.pop(key) for key in own & data.keys() - {"prediction"}}
    data.pop("microbatches", None)  # the schedule has them
    if isinstance(proof := data.get("proof"), dict):  # which told in words what its bounds are about
        data["proof"] = {key: proof[key] for key in ("cost", "seconds") if key in proof}
    if data.get("stages"):
        return data
    mesh, splits = top.get("mesh"), top.get("splits")
    sizes = [axis[1] for axis in mesh if isinstance(axis, list) and len(axis) == 2] if isinstance(mesh, list) else []
    devices = prod(size for size in sizes if isinstance(size, int))
    top["ranks"] = list(range(devices)) if 0 < devices <= MOST_DEVICES else []
    top["operators"] = list(splits) if isinstance(splits, dict) else []
    signature = data.get("signature")
    trains = not isinstance(signature, dict) or signature.get("training") is not False
    return {**data, "stages": [top], "schedule": [str(one_pass(trains))]}


@dataclass(frozen=True, kw_only=True)
class _Document:
    """The file, key by key."""

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
    cluster: dict[str, Any]
    asked: PlanRequest = field(default_factory=PlanRequest)
    graph: str | None = None
    stages: tuple[StageText, ...]
    schedule: tuple[str, ...]
    serving: Serving | None = None
    batch_norm: str = WHOLE
    also: tuple[str | None, ...] = ()


def _cluster(data: dict[str, Any]) -> Cluster:
    def self_contained(name: str) -> Any:
        raise PlanError(f"The plan's cluster names the device {name!r} without describing it.", "Plan again.")

    return cluster_from(data, "of the plan", self_contained)


def _plan(data: _Document, where: str) -> Plan:
    stages = tuple(stage_from(stage, f"stage {number} of {where}") for number, stage in enumerate(data.stages))
    every = sorted({rank for stage in stages for rank in stage.ranks})
    if every != list(range(len(every))):
        raise PlanError(f"The ranks of {where} are {shown(every)}: they go from 0 on.", "Plan again.")
    for name, dtype, shape in (*data.signature.inputs, *data.signature.parameters):
        if dtype not in DTYPE_BYTES or any(extent < 0 for extent in shape):
            raise PlanError(f"{where} is damaged: {shown(name)} is {shown(dtype)}{shown(list(shape))}.", "Plan again.")
    if data.batch_norm not in (WHOLE, PER_PIECE):
        raise PlanError(f"{where} is damaged: its batch_norm is {shown(data.batch_norm)}.", "Plan again.")
    return Plan(
        model=data.model,
        signature=data.signature,
        cluster=_cluster(data.cluster),
        stages=stages,
        schedule=schedule_from(data.schedule, where),
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
        serving=data.serving,
        batch_norm=data.batch_norm,
        also=tuple(one for one in data.also if one is not None),
    )
