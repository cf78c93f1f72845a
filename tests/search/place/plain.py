"""Random small workloads, and the objectives and rules written down as plainly as possible, to check solvers against."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Set

import numpy as np
from hypothesis import strategies as st

from shardwright.search.place.problem import DeviceKind, Placement, Rules, Stage, Workload

TIMES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 7.5])
COSTS = st.sampled_from([0.0, 0.25, 1.0, 2.5])


@st.composite
def workloads(
    draw: st.DrawFn, *, most_nodes: int = 6, training: bool = True, unlike: bool = False, parameters: bool = False
) -> Workload:
    n = draw(st.integers(1, most_nodes))
    backward = np.zeros(n, dtype=bool)
    if training and draw(st.booleans()):
        backward[draw(st.integers(0, n - 1)) + 1 :] = True
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    edges = [pair for pair in pairs if draw(st.booleans())] if pairs else []
    kinds = [DeviceKind("accelerator", draw(st.integers(1, 2)), draw(st.sampled_from([3.0, 6.0, 100.0])))]
    if unlike:
        kinds.append(DeviceKind("other", 1, draw(st.sampled_from([3.0, 100.0])), transfer_factor=2.0))
    kinds.append(DeviceKind("cpu", 1, host=True))
    times = np.array([[draw(TIMES) for _ in kinds] for _ in range(n)])
    for row in range(n):
        if draw(st.integers(0, 5)) == 0:
            times[row, 0] = np.inf
    classes = np.array([draw(st.integers(0, 2 * n)) for _ in range(n)])
    return Workload(
        kinds=tuple(kinds),
        times=times,
        memory=np.array([draw(st.sampled_from([0.0, 1.0, 2.0])) for _ in range(n)]),
        transfer=np.array([draw(COSTS) for _ in range(n)]),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        backward=backward,
        classes=classes,
        parameter_bytes=np.array([draw(st.sampled_from([0.0, 4.0])) for _ in range(n)]) if parameters else np.zeros(n),
        sync_bandwidth=8.0 if parameters else float("inf"),
    )


def forward_pairs(workload: Workload) -> set[tuple[int, int]]:
    """Pairs of classes that must not go backwards in the order of stages, by the letter of the training rule."""
    has_forward = {int(c) for c, b in zip(workload.classes, workload.backward, strict=True) if not b}
    pairs = set()
    for a, b in workload.edges.tolist():
        ca, cb = int(workload.classes[a]), int(workload.classes[b])
        if not workload.backward[a] and not workload.backward[b]:
            pairs.add((ca, cb))
        elif workload.backward[a] and workload.backward[b] and not (ca in has_forward and cb in has_forward):
            pairs.add((cb, ca))
    return pairs


def in_order(workload: Workload, stage_of: list[int], stages: int) -> bool:
    """Whether the stages can be ordered so that no forward pair goes backwards."""
    place = {int(c): s for c, s in zip(workload.classes, stage_of, strict=True)}
    pairs = {(place[a], place[b]) for a, b in forward_pairs(workload)}
    used = sorted({*stage_of})
    return any(
        all(order.index(a) <= order.index(b) for a, b in pairs) for order in map(list, itertools.permutations(used))
    )


def plain_load(workload: Workload, nodes: Set[int], kind: int, replicas: int, rules: Rules) -> list[float]:
    """The load of one stage, per pass when passes are separate, counted edge by edge."""
    work, sent, received = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for v in nodes:
        work[int(workload.backward[v])] += workload.times[v, kind]
    successors: dict[int, set[int]] = {}
    for a, b in workload.edges.tolist():
        successors.setdefault(a, set()).add(b)
    for a, targets in successors.items():
        price = workload.transfer[a] * workload.kinds[kind].pays
        if a in nodes and targets - nodes:
            sent[int(workload.backward[a])] += price
        if a not in nodes and targets & nodes:
            received[int(workload.backward[a])] += price
    parameters = sum(workload.parameter_bytes[v] for v in nodes)
    if replicas > 1:
        work[1] += 4 * (replicas - 1) * parameters / (replicas * workload.sync_bandwidth)
    if not rules.separate_passes:
        work, sent, received = [sum(work)], [sum(sent)], [sum(received)]
    combine = max if rules.overlap else lambda *parts: sum(parts)
    return [combine(*parts) / replicas for parts in zip(work, sent, received, strict=True)]


def plain_value(workload: Workload, placement: Placement, rules: Rules) -> float:
    """The throughput objective of a placement with one stage per device."""
    loads = [
        plain_load(workload, {*placement.members(s).tolist()}, stage.kind, len(stage.devices), rules)
        for s, stage in enumerate(placement.stages)
        if len(placement.members(s))
    ]
    return sum(max(column) for column in zip(*loads, strict=True))


def plain_best(workload: Workload, rules: Rules, *, contiguous: bool = True) -> float:
    """The optimum by trying everything; infinite when nothing fits."""
    classes = int(workload.classes.max()) + 1
    most = workload.devices
    options = [
        (k, m)
        for k, kind in enumerate(workload.kinds)
        for m in range(1, (kind.count if rules.replicate and not kind.host else 1) + 1)
    ]
    load = functools.cache(lambda nodes, kind, replicas: plain_load(workload, nodes, kind, replicas, rules))
    room = functools.cache(lambda nodes, kind: sum(workload.memory[list(nodes)]) <= workload.kinds[kind].room)
    best = float("inf")
    for labels in itertools.product(range(min(classes, most)), repeat=classes):
        used = max(labels) + 1
        if sorted(set(labels)) != list(range(used)) or any(
            labels.index(s) > labels.index(s + 1) for s in range(used - 1)
        ):
            continue  # stage numbers are only names: keep one naming of every partition
        stage_of = [labels[c] for c in workload.classes]
        if contiguous and not in_order(workload, stage_of, used):
            continue
        members = [frozenset(v for v in range(workload.nodes) if stage_of[v] == s) for s in range(used)]
        for choice in itertools.product(options, repeat=used):
            if any(sum(m for k, m in choice if k == kind) > d.count for kind, d in enumerate(workload.kinds)):
                continue
            if all(room(nodes, k) for nodes, (k, _) in zip(members, choice, strict=True)):
                loads = [load(nodes, k, m) for nodes, (k, m) in zip(members, choice, strict=True)]
                best = min(best, sum(max(column) for column in zip(*loads, strict=True)))
    return best


def single_stage(workload: Workload, kind: int) -> Placement:
    return Placement(np.zeros(workload.nodes, dtype=np.int64), (Stage(kind, (0,)),))
