"""What a placement costs, and whether it is valid: the one evaluation every solver's answer goes through.

The load of an accelerator stage S is the sum of its nodes' times, plus the transfer cost of every outside node with an edge
into S, plus that of every node of S with an edge out of S; a host pays no transfers. A stage replicated over m devices
takes (time + transfers + 4 (m-1) parameter bytes / (m bandwidth)) / m, PipeDream's formula (SOSP 2019). Contiguity is
checked as: the stages can be put in an order that no forward edge goes against, so they form a chain of ideals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.search.place.problem import FloatArray, Placement, Rules, Workload
from shardwright.search.place.reductions import class_order, contract_classes, distinct, strong_components

TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Per stage (rows) and pass (columns: forward, backward): computing, receiving, sending; memory and synchronising."""

    compute: FloatArray
    receive: FloatArray
    send: FloatArray
    memory: FloatArray
    sync: FloatArray
    replicas: FloatArray

    def loads(self, rules: Rules) -> FloatArray:
        """Time per sample of every stage: one column, or one per pass where the rules keep the passes apart."""
        work = self.compute.copy()
        work[:, -1] += self.sync
        parts = [work, self.receive, self.send]
        if not rules.separate_passes:
            parts = [part.sum(axis=1, keepdims=True) for part in parts]
        together = np.maximum.reduce(parts) if rules.overlap else np.add.reduce(parts)
        return together / self.replicas[:, None]


def stage_costs(workload: Workload, placement: Placement) -> StageCosts:
    """Count every stage's computing, transfers and memory."""
    stages, stage_of = placement.stages, placement.stage_of
    count = len(stages)
    kind_of = np.array([stage.kind for stage in stages], dtype=np.int64)
    replicas = np.array([1 if workload.kinds[s.kind].host else len(s.devices) for s in stages], dtype=np.float64)
    pays = np.array([workload.kinds[k].pays for k in kind_of])
    passes = workload.backward.astype(np.int64)
    cell = stage_of * 2 + passes
    times = workload.times[np.arange(workload.nodes), kind_of[stage_of]]
    compute = np.bincount(cell, weights=times, minlength=2 * count).reshape(count, 2)
    receive, send = np.zeros((count, 2)), np.zeros((count, 2))
    source, target = workload.edges[:, 0], stage_of[workload.edges[:, 1]]
    cut = stage_of[source] != target
    arrivals = distinct(source[cut] * count + target[cut])
    nodes, where = arrivals // count, arrivals % count
    np.add.at(receive, (where, passes[nodes]), workload.transfer[nodes] * pays[where])
    senders = distinct(source[cut])
    np.add.at(send, (stage_of[senders], passes[senders]), workload.transfer[senders] * pays[stage_of[senders]])
    parameters = np.bincount(stage_of, weights=workload.parameter_bytes, minlength=count)
    sync = 4.0 * (replicas - 1) / replicas * parameters / workload.sync_bandwidth
    return StageCosts(
        compute=compute,
        receive=receive,
        send=send,
        memory=np.bincount(stage_of, weights=workload.memory, minlength=count),
        sync=np.where(parameters > 0, sync, 0.0),
        replicas=replicas,
    )


def throughput_cost(workload: Workload, placement: Placement, rules: Rules | None = None) -> float:
    """Time per sample of a full pipeline: the largest load (or largest forward plus largest backward load).

    Stages that share a device add up.
    """
    rules = rules or Rules()
    loads = stage_costs(workload, placement).loads(rules)
    per_device: dict[tuple[int, int], np.ndarray] = {}
    for stage, load in zip(placement.stages, loads, strict=True):
        for device in stage.devices:
            key = (stage.kind, device)
            per_device[key] = per_device.get(key, 0.0) + load
    return float(np.array(list(per_device.values())).max(axis=0).sum()) if per_device else 0.0


def violations(workload: Workload, placement: Placement, *, contiguous: bool = True) -> list[str]:
    """Every way in which the placement breaks the rules, in words; empty when it is valid."""
    found: list[str] = []
    stage_of, stages = placement.stage_of, placement.stages
    if len(stage_of) != workload.nodes or (workload.nodes and not 0 <= stage_of.min() <= stage_of.max() < len(stages)):
        return ["not every node has a stage"]
    for number, stage in enumerate(stages):
        if not stage.devices or max(stage.devices) >= workload.kinds[stage.kind].count:
            found.append(f"stage {number} uses devices {stage.devices} that do not exist")
    kinds = np.array([stage.kind for stage in stages])[stage_of]
    for node in np.flatnonzero(~np.isfinite(workload.times[np.arange(workload.nodes), kinds])):
        found.append(f"node {workload.label(int(node))} does not run on {workload.kinds[kinds[node]].name}")
    first = np.full(int(workload.classes.max(initial=-1)) + 1, -1)
    first[workload.classes[::-1]] = np.arange(workload.nodes)[::-1]
    device_of = _device_numbers(placement)[stage_of]
    for node in np.flatnonzero(device_of != device_of[first[workload.classes]]):
        found.append(f"node {workload.label(int(node))} is apart from its co-location class")
    memory = np.bincount(stage_of, weights=workload.memory, minlength=len(stages))
    used: dict[tuple[int, int], float] = {}
    for number, stage in enumerate(stages):
        for device in stage.devices:
            used[stage.kind, device] = used.get((stage.kind, device), 0.0) + memory[number]
    for (kind, device), held in used.items():
        if held > workload.kinds[kind].room * (1 + TOLERANCE):
            found.append(f"{workload.kinds[kind].name} {device} holds {held:.6g} bytes")
    if contiguous:
        found += _disorder(workload, placement)
    return found


def _device_numbers(placement: Placement) -> np.ndarray:
    number: dict[tuple[int, tuple[int, ...]], int] = {}
    return np.array([number.setdefault((s.kind, s.devices), len(number)) for s in placement.stages], dtype=np.int64)


def _disorder(workload: Workload, placement: Placement) -> list[str]:
    blocks = contract_classes(workload)
    stage_of_class = np.zeros(blocks.count, dtype=np.int64)
    stage_of_class[blocks.block_of] = placement.stage_of
    order = class_order(workload)
    ends = stage_of_class[order]
    components = strong_components(len(placement.stages), ends[ends[:, 0] != ends[:, 1]])
    sizes = np.bincount(components)
    tangled = np.flatnonzero(sizes[components] > 1)
    return [f"stages {tangled.tolist()} form a cycle: the placement is not contiguous"] if len(tangled) else []
