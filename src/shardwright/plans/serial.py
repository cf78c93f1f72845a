"""``plan.json``: readable, diffable, versioned, free of code. One line per operator and per parameter.

Placements are written ``R``, ``S0`` and ``P(sum)``, a split is the list of loops each mesh axis cuts. The last line is the
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
from shardwright.operators.strategy import Strategy
from shardwright.plans.decided import NestText, RouteText, decisions_from, nests_text, routes_text
from shardwright.plans.layouts import layout_from, layout_text, placement_from, placement_text
from shardwright.plans.packed import pack
from shardwright.plans.plan import Asked, Candidate, Plan, Prediction, Proof, Signature
from shardwright.program import Sizes
from shardwright.records import read_record, shown

__all__ = ["from_json", "layout_text", "placement_from", "placement_text", "to_json"]

FORMAT = "shardwright-plan-2"
EARLIER = ("shardwright-plan-1",)
"""Formats that are still read: a plan of format 1 leaves routes and sums to the prices of its cluster."""


def to_json(plan: Plan) -> str:
    """The plan as a JSON document; ``from_json(to_json(p)) == p``."""
    s = plan.strategy
    document: dict[str, Any] = {
        "format": FORMAT,
        "model": plan.model,
        "batch": plan.batch,
        "sequence": plan.sequence,
        "dtype": plan.dtype,
        "search": plan.search,
        "optimiser": plan.optimiser,
        "calibration": plan.calibration,
        "mesh": [list(axis) for axis in s.axes],
        "prediction": vars(plan.prediction),
        "proof": vars(plan.proof),
        "notes": list(plan.notes),
        "asked": vars(plan.asked),
        "candidates": [
            {"name": c.name, "mesh": c.mesh, "note": c.note, "prediction": c.prediction and vars(c.prediction)}
            for c in plan.candidates
        ],
        "replicated": [list(r) for r in plan.replicated],
        "signature": vars(plan.signature),
        "splits": {name: list(split) for name, split in s.splits.items()},
        "resting": {name: layout_text(layout) for name, layout in s.resting.items()},
        "kept": {name: layout_text(layout) for name, layout in s.kept.items()},
        "regathered": sorted(s.regathered),
        "whole_gradients": sorted(s.whole_gradients),
        "recomputed": list(s.recomputed),
        "shares": {name: list(shares) for name, shares in s.shares.items()},
        "sizes": vars(plan.decisions.sizes),
        "routes": routes_text(plan.decisions),
        "nests": nests_text(plan.decisions),
        "cluster": toml_text.loads(cluster_to_toml(plan.cluster)),
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
        elif isinstance(value, list) and value and key in ("candidates", "replicated", "notes", "routes", "nests"):
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
    return _plan(
        read_record(_Document, data, where=f"{where} is damaged", error=PlanError, remedy="Plan again."), where
    )


@dataclass(frozen=True)
class _Document:
    """The file, key by key: what is decided about the strategy stands at the top, where people look for it."""

    format: str
    model: str
    batch: int | None
    sequence: int | None
    dtype: str | None
    search: str
    optimiser: str
    calibration: str
    mesh: tuple[tuple[str, int], ...]
    prediction: Prediction
    proof: Proof
    notes: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    replicated: tuple[tuple[str, str, float], ...]
    signature: Signature
    splits: dict[str, tuple[str | None, ...]]
    resting: dict[str, tuple[str, ...]]
    kept: dict[str, tuple[str, ...]]
    regathered: frozenset[str]
    recomputed: tuple[str, ...]
    cluster: dict[str, Any]
    asked: Asked = field(default_factory=Asked)
    whole_gradients: frozenset[str] = frozenset()
    graph: str | None = None
    shares: dict[str, tuple[float, ...]] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
    routes: tuple[RouteText, ...] = ()
    nests: tuple[NestText, ...] = ()


def _cluster(data: dict[str, Any]) -> Cluster:
    def self_contained(name: str) -> Any:
        raise PlanError(f"The plan's cluster names the device {name!r} without describing it.", "Plan again.")

    return cluster_from(data, "of the plan", self_contained)


def _plan(data: _Document, where: str) -> Plan:
    axes = len(data.mesh)
    if not axes or any(size < 1 for _, size in data.mesh) or len(dict(data.mesh)) != axes:
        raise PlanError(f"{where} is damaged: its mesh is {shown(data.mesh)}.", "Plan again.")
    for what, entries in (("splits", data.splits), ("resting", data.resting), ("kept", data.kept)):
        for name, entry in entries.items():
            if len(entry) != axes:
                raise PlanError(
                    f"{where} is damaged: {what}.{name} is {shown(entry)}, and the mesh has {axes} axes.", "Plan again."
                )
    return Plan(
        model=data.model,
        signature=data.signature,
        cluster=_cluster(data.cluster),
        strategy=Strategy(
            axes=data.mesh,
            splits=data.splits,
            resting={name: layout_from(layout) for name, layout in data.resting.items()},
            kept={name: layout_from(layout) for name, layout in data.kept.items()},
            regathered=data.regathered,
            recomputed=data.recomputed,
            whole_gradients=data.whole_gradients,
            shares=data.shares,
        ),
        search=data.search,
        optimiser=data.optimiser,
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
        decisions=decisions_from(data.sizes, data.routes, data.nests, axes),
    )
