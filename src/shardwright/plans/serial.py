"""``plan.json``: readable, diffable, versioned, free of code. One line per operator and per parameter.

Placements are written ``R``, ``S0`` and ``P(sum)``, a split is the list of loops each mesh axis cuts.
"""

from __future__ import annotations

import json
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.cluster import Cluster, cluster_to_toml, toml_text
from shardwright.cluster.serial import cluster_from
from shardwright.errors import PlanError, ShardwrightError
from shardwright.operators.rules import Layout, Placement
from shardwright.operators.strategy import Strategy
from shardwright.plans.plan import Asked, Candidate, Plan, Prediction, Proof, Signature

FORMAT = "shardwright-plan-1"


def placement_text(placement: Placement) -> str:
    """``R``, ``S1`` or ``P(sum)``.

    >>> placement_text(Shard(1))
    'S1'
    """
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return f"P({placement.reduce_op})" if isinstance(placement, Partial) else "R"


def placement_from(text: str) -> Placement:
    """The inverse of :func:`placement_text`."""
    if text == "R":
        return Replicate()
    if text.startswith("S") and text[1:].isdigit():
        return Shard(int(text[1:]))
    if text.startswith("P(") and text.endswith(")"):
        return Partial(text[2:-1])
    raise PlanError(f"{text!r} is not a placement.", "Placements are R, S0, S1, … and P(sum).")


def layout_text(layout: Layout) -> list[str]:
    return [placement_text(p) for p in layout]


def _layout(texts: list[str]) -> Layout:
    return tuple(placement_from(t) for t in texts)


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
        "cluster": toml_text.loads(cluster_to_toml(plan.cluster)),
    }
    return _readable(document)


def _readable(document: dict[str, Any]) -> str:
    """JSON with one line per entry of the top-level objects: long enough to read, short enough to diff."""
    lines = []
    for key, value in document.items():
        if isinstance(value, dict) and value:
            entries = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{entries}\n }}")
        elif isinstance(value, list) and value and key in ("candidates", "replicated", "notes"):
            entries = ",\n".join(f"  {json.dumps(v)}" for v in value)
            lines.append(f"{json.dumps(key)}: [\n{entries}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def from_json(text: str, where: str = "the plan") -> Plan:
    """Read a plan; anything malformed is one sentence."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{where} is not JSON: {error}.", "Write it again with `shardwright plan … -o plan.json`."
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise PlanError(
            f"{where} is not a plan of format {FORMAT!r} (found {found!r}).", "Plan again with this version."
        )
    try:
        return _plan(data)
    except ShardwrightError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{where} is damaged: {type(error).__name__} {error}.", "Plan again.") from None


def _cluster(data: dict[str, Any]) -> Cluster:
    def self_contained(name: str) -> Any:
        raise PlanError(f"The plan's cluster names the device {name!r} without describing it.", "Plan again.")

    return cluster_from(data, "of the plan", self_contained)


def _plan(data: dict[str, Any]) -> Plan:
    strategy = Strategy(
        axes=tuple((name, int(size)) for name, size in data["mesh"]),
        splits={name: tuple(split) for name, split in data["splits"].items()},
        resting={name: _layout(layout) for name, layout in data["resting"].items()},
        kept={name: _layout(layout) for name, layout in data["kept"].items()},
        regathered=frozenset(data["regathered"]),
        recomputed=tuple(data["recomputed"]),
        whole_gradients=frozenset(data.get("whole_gradients", ())),
    )
    signature, asked = data["signature"], data.get("asked", {})
    return Plan(
        model=data["model"],
        signature=Signature(
            signature["fingerprint"],
            signature["operators"],
            tuple((n, d, tuple(s)) for n, d, s in signature["parameters"]),
            tuple((n, d, tuple(s)) for n, d, s in signature["inputs"]),
            signature["training"],
        ),
        cluster=_cluster(data["cluster"]),
        strategy=strategy,
        search=data["search"],
        optimiser=data["optimiser"],
        prediction=Prediction(**data["prediction"]),
        proof=Proof(**data["proof"]),
        calibration=data["calibration"],
        candidates=tuple(
            Candidate(
                c["name"],
                tuple((n, int(s)) for n, s in c["mesh"]),
                Prediction(**c["prediction"]) if c["prediction"] else None,
                c["note"],
            )
            for c in data["candidates"]
        ),
        replicated=tuple((a, b, c) for a, b, c in data["replicated"]),
        notes=tuple(data["notes"]),
        asked=Asked(asked.get("memory_limit"), tuple(asked.get("pins", ())), tuple(asked.get("forbidden", ()))),
        batch=data["batch"],
        sequence=data["sequence"],
        dtype=data["dtype"],
    )
