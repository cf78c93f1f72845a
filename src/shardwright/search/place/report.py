"""What a placement looks like, device by device: load, computing, transfers, memory; and which device limits it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.search.place.measure import stage_costs
from shardwright.search.place.problem import Placement, Rules, Workload


@dataclass(frozen=True)
class StageRow:
    """One stage: the devices it runs on, and per sample what it computes, receives, sends, synchronises and holds."""

    devices: str
    nodes: int
    compute: float
    receive: float
    send: float
    sync: float
    load: float
    memory: float
    room: float


def stage_rows(workload: Workload, placement: Placement, rules: Rules | None = None) -> list[StageRow]:
    """One row per stage, in order; a replicated stage shows its load per sample, divided between its devices."""
    rules = rules or Rules()
    costs = stage_costs(workload, placement)
    loads = costs.loads(rules).sum(axis=1)
    counts = np.bincount(placement.stage_of, minlength=len(placement.stages))
    rows = []
    for s, stage in enumerate(placement.stages):
        kind = workload.kinds[stage.kind]
        numbers = ",".join(map(str, stage.devices)) if len(stage.devices) <= 4 else f"0-{len(stage.devices) - 1}"
        rows.append(
            StageRow(
                devices=f"{kind.name} {numbers}",
                nodes=int(counts[s]),
                compute=float(costs.compute[s].sum()),
                receive=float(costs.receive[s].sum()),
                send=float(costs.send[s].sum()),
                sync=float(costs.sync[s]),
                load=float(loads[s]),
                memory=float(costs.memory[s]),
                room=kind.room,
            )
        )
    return rows


def limiting(rows: list[StageRow]) -> str:
    """The devices of the largest load, and what most of that load is."""
    if not rows:
        return "nothing"
    worst = max(rows, key=lambda row: row.load)
    moved = worst.receive + worst.send
    parts = {"computing": worst.compute, "transfers": moved, "synchronising": worst.sync}
    return f"{worst.devices} ({max(parts, key=lambda part: parts[part])})"
