"""Piper's problems (Tarnawski et al., NeurIPS 2021): data × tensor × pipeline parallelism and recomputing, on any
graph.

A stage is a difference of two ideals, run with tensor degree t and data degree d on t·d devices. Every node chooses
one of its ways (with or without recomputing) so that the stage's memory, Σ A · (micro-batches held) + B, stays within
the device's: a cheapest covering. Seconds per sample = Σ time / d + (2 Σ crossing bytes / d + 4 (d − 1) Σ parameters
/ d / batch) / bandwidth; the slowest stage counts.

First every covering is answered and bounded by ratios. The pipeline found with the answers is a threshold: a stage
whose bound lies above it, or which leaves more work than the other devices can do under it, belongs to no better
pipeline. The coverings of what remains are solved exactly, and so is the problem.
"""

# ruff: noqa: N815 - the names of what is read are the format's
from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.published.anytime import Report, nobody
from bench.published.covering import cheapest_cover, cheapest_covers, cover_in_ratio_order
from bench.published.reading import REMEDY, between, check
from shardwright.errors import ProblemError, TooLarge
from shardwright.files import read_json
from shardwright.records import read_record
from shardwright.search.joint.compose import Pipeline, compose
from shardwright.search.joint.ideals import ideals_of, nested
from shardwright.search.joint.problem import (
    THROUGHPUT,
    Floats,
    Ints,
    PipelineProblem,
    PlacedStage,
    StageTable,
    pack,
)
from shardwright.search.solution import Solution

MOST_IDEALS = 5_000
MOST_DEVICES = 4096
MOST_STAGES = 3e7
"""Stages times devices: the tables of prices would not fit into memory."""
MOST_VISITS = 100_000  # of one covering's search tree


@dataclass(frozen=True)
class Degree:
    """All nodes run with one tensor-parallel degree: the first way of each, and what the second way changes."""

    tensor: int
    time: Floats
    parameters: Floats
    memory_held: Floats  # times micro-batches held
    memory_fixed: Floats
    more_time: Floats  # of the second way, which holds less
    less_held: Floats
    less_fixed: Floats
    crossing: Floats  # [edges, 2]: bytes of an edge that enters a stage with its target, that leaves with its source


@dataclass(frozen=True)
class PiperProblem:
    """A graph with its degrees, and the machine."""

    name: str
    devices: int
    memory: float
    bandwidth: float
    batch: int
    edges: Ints
    nodes: tuple[str, ...]
    degrees: tuple[Degree, ...]


@dataclass(frozen=True)
class _Way:
    others_allowed: ClassVar[bool] = True
    timePerSample: float
    parameterSize: float
    memoryUsageA: float
    memoryUsageB: float
    syncTimeFw: dict[str, float]
    syncTimeBw: dict[str, float]


@dataclass(frozen=True)
class _Node:
    others_allowed: ClassVar[bool] = True
    id: int | str
    TMPCs: dict[str, tuple[_Way, ...]]


@dataclass(frozen=True)
class _Edge:
    others_allowed: ClassVar[bool] = True
    sourceId: int | str
    destId: int | str
    communicationCost: float


@dataclass(frozen=True)
class _File:
    others_allowed: ClassVar[bool] = True
    nodes: tuple[_Node, ...]
    edges: tuple[_Edge, ...]
    maxDevices: int
    maxMemoryPerDevice: float
    bandwidth: float
    mbsInBatch: int


def _check(file: _File) -> None:
    between(len(file.nodes), 1, 20_000, "the number of nodes")
    between(file.maxDevices, 1, MOST_DEVICES, "maxDevices")
    between(file.maxMemoryPerDevice, 0, 1e30, "maxMemoryPerDevice")
    between(file.bandwidth, 1e-30, 1e30, "bandwidth")
    between(file.mbsInBatch, 1, 10**12, "mbsInBatch")
    known = {node.id for node in file.nodes}
    check(len(known) == len(file.nodes), "two nodes have the same id")
    for edge in file.edges:
        check({edge.sourceId, edge.destId} <= known, f"an edge joins {edge.sourceId!r:.40} and {edge.destId!r:.40}")
        between(edge.communicationCost, 0, 1e30, "communicationCost")
    for node in file.nodes:
        where = f"of node {node.id!r:.40}"
        for tensor, ways in node.TMPCs.items():
            check(
                tensor.isdecimal() and 0 < int(tensor[:9]) <= MOST_DEVICES,
                f"a tensor degree {where} is {tensor[:20]!r}",
            )
            check(bool(ways), f"the degree {tensor} {where} has no way to run")
            for way in ways:
                sizes = (way.timePerSample, way.parameterSize, way.memoryUsageA, way.memoryUsageB)
                numbers = (*sizes, *way.syncTimeFw.values(), *way.syncTimeBw.values())
                check(all(0 <= number <= 1e30 for number in numbers), f"a number {where} is out of range")
    check(
        bool(set.intersection(*({int(t) for t in node.TMPCs} for node in file.nodes))),
        "no tensor degree is every node's",
    )


@dataclass(frozen=True)
class Pairs:
    """Pairs of ideals, one inside the other: ``member[p]`` are the nodes of the stage between them."""

    ideals: int
    start: Ints
    end: Ints
    member: np.ndarray


def read_piper(
    source: str | Path | dict[str, Any],
    *,
    devices: int | None = None,
    memory: float | None = None,
    bandwidth: float | None = None,
    name: str = "",
) -> PiperProblem:
    """A problem in Piper's format; ``devices``, ``memory`` (bytes) and ``bandwidth`` (bytes/s) replace the file's
    own.
    """
    if not isinstance(source, dict):
        name = name or Path(source).stem
    data: dict[str, Any] = source if isinstance(source, dict) else read_json(source, ProblemError)
    _check(
        read_record(_File, data, where=f"{name or 'it'} is no problem of Piper's", error=ProblemError, remedy=REMEDY)
    )
    between(devices or 1, 1, MOST_DEVICES, "the number of devices")
    rows = {node["id"]: row for row, node in enumerate(data["nodes"])}
    edges = np.array([[rows[e["sourceId"]], rows[e["destId"]]] for e in data["edges"]], dtype=np.int64).reshape(-1, 2)
    tensor = sorted(set.intersection(*({int(t) for t in node["TMPCs"]} for node in data["nodes"])))
    return PiperProblem(
        name=name or "piper",
        devices=devices or int(data["maxDevices"]),
        memory=memory or float(data["maxMemoryPerDevice"]),
        bandwidth=bandwidth or float(data["bandwidth"]),
        batch=int(data["mbsInBatch"]),
        edges=edges,
        nodes=tuple(str(node.get("name", node["id"])) for node in data["nodes"]),
        degrees=tuple(_degree(data, t) for t in tensor),
    )


def _degree(data: dict[str, Any], tensor: int) -> Degree:
    first, second = [], []
    for node in data["nodes"]:
        ways = node["TMPCs"][str(tensor)]
        same = all((w["parameterSize"], w["syncTimeFw"], w["syncTimeBw"]) == _fixed(ways[0]) for w in ways)
        if len(ways) > 2 or not same:
            raise ProblemError(
                f"node {node['id']} has {len(ways)} ways with tensor degree {tensor}, not one or two that differ only in "
                "time and activations.",
                "Leave the others out: per node and degree, the plain way and the one that recomputes.",
            )
        slow = ways[-1]
        if slow["timePerSample"] < ways[0]["timePerSample"]:
            ways = ways[::-1]
        first.append(ways[0])
        second.append(ways[-1])

    def column(rows: list[dict[str, Any]], key: str) -> Floats:
        return np.array([row[key] for row in rows], dtype=np.float64)

    by_id = {node["id"]: row for row, node in enumerate(data["nodes"])}
    crossing = np.array(
        [
            [
                e["communicationCost"] + first[by_id[e["destId"]]]["syncTimeFw"].get(str(e["sourceId"]), 0.0),
                e["communicationCost"] + first[by_id[e["sourceId"]]]["syncTimeBw"].get(str(e["destId"]), 0.0),
            ]
            for e in data["edges"]
        ]
    ).reshape(-1, 2)
    return Degree(
        tensor=tensor,
        time=column(first, "timePerSample"),
        parameters=column(first, "parameterSize"),
        memory_held=column(first, "memoryUsageA"),
        memory_fixed=column(first, "memoryUsageB"),
        more_time=column(second, "timePerSample") - column(first, "timePerSample"),
        less_held=column(first, "memoryUsageA") - column(second, "memoryUsageA"),
        less_fixed=column(first, "memoryUsageB") - column(second, "memoryUsageB"),
        crossing=crossing,
    )


def _fixed(way: dict[str, Any]) -> tuple[Any, ...]:
    return way["parameterSize"], way["syncTimeFw"], way["syncTimeBw"]


def solve_piper(problem: PiperProblem, report: Report = nobody) -> Solution[Pipeline]:
    """The best pipeline and its proof; see the module's paragraph for how.

    >>> solution = solve_piper(read_piper("bert32a100.json", devices=8, memory=80e9))  # doctest: +SKIP
    >>> round(solution.cost, 7)  # doctest: +SKIP
    0.1220073
    """
    started = time.perf_counter()
    pairs = pairs_of_ideals(problem)
    by_ratio = [_coverings(problem, pairs, degree) for degree in problem.degrees]
    rough = compose(_problem(problem, pairs, by_ratio, np.inf, exact=False))
    if not rough.optimal:
        report(rough)
        rough = compose(_problem(problem, pairs, by_ratio, rough.cost, exact=True))
    return Solution(rough.answer, rough.cost, rough.lower_bound, rough.optimal, time.perf_counter() - started)


def pairs_of_ideals(problem: PiperProblem) -> Pairs:
    """All pairs of ideals, ideals numbered by size."""
    n = len(problem.nodes)
    order = _topological(n, problem.edges)
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    found = ideals_of(n, place[problem.edges], MOST_IDEALS)
    if found is None:
        raise TooLarge(
            f"{problem.name} has more than {MOST_IDEALS} ideals.", "Merge parallel branches that belong together first."
        )
    ideals = found[:, place]  # by the problem's own numbering of nodes
    start, end = np.nonzero(nested(ideals))
    by_start = np.argsort(-start, kind="stable")
    start, end = start[by_start], end[by_start]
    if len(start) * problem.devices > MOST_STAGES:
        raise TooLarge(
            f"{problem.name} has {len(start)} possible stages on {problem.devices} devices.", "Ask for fewer devices."
        )
    return Pairs(len(ideals), start, end, ideals[end] & ~ideals[start])


def _topological(n: int, edges: Ints) -> Ints:
    waiting = np.bincount(edges[:, 1], minlength=n) if len(edges) else np.zeros(n, dtype=np.int64)
    ready = [v for v in range(n) if not waiting[v]]
    order: list[int] = []
    while ready:
        v = ready.pop(0)
        order.append(v)
        for b in edges[edges[:, 0] == v, 1]:
            waiting[b] -= 1
            if not waiting[b]:
                ready.append(int(b))
    if len(order) < n:
        raise ProblemError("the graph has a cycle.", "A pipeline needs a graph without one.")
    return np.array(order, dtype=np.int64)


@dataclass(frozen=True)
class Coverings:
    """Per pair and number of micro-batches held (from 1): seconds of the ways chosen, before dividing by the data
    degree.
    """

    degree: Degree
    answer: Floats  # [pairs, held]
    bound: Floats
    crossing: Floats  # [pairs]
    parameters: Floats
    need: Floats  # [pairs, held]: bytes that must be freed
    base: Floats  # [pairs]: seconds of the first ways


def _items(degree: Degree, held: int) -> tuple[Ints, Floats, Floats]:
    """The nodes whose second way frees memory when so many micro-batches are held, best ratio first: nodes, costs,
    gains.
    """
    gains = degree.less_held * held + degree.less_fixed
    useful = np.nonzero(gains > 0)[0]
    order = useful[np.argsort(degree.more_time[useful] / gains[useful], kind="stable")]
    return order, degree.more_time[order], gains[order]


def _coverings(problem: PiperProblem, pairs: Pairs, degree: Degree) -> Coverings:
    member = pairs.member
    base = member @ degree.time
    held_bytes, fixed_bytes = member @ degree.memory_held, member @ degree.memory_fixed
    most = problem.devices
    answer = np.full((len(base), most), np.inf)
    bound, need = answer.copy(), np.empty_like(answer)
    alive = np.arange(len(base))  # what does not fit with few held does not with more
    for held in range(1, most + 1):
        excess = held_bytes * held + fixed_bytes - problem.memory
        need[:, held - 1] = excess
        nodes, costs, gains = _items(degree, held)
        paid, relaxed = cover_in_ratio_order(costs, gains, member[alive][:, nodes], excess[alive])
        answer[alive, held - 1] = base[alive] + paid
        bound[alive, held - 1] = base[alive] + relaxed
        alive = alive[np.isfinite(paid)]
        if not len(alive):
            break
    edges_in = member[:, problem.edges[:, 1]] & ~member[:, problem.edges[:, 0]]
    edges_out = member[:, problem.edges[:, 0]] & ~member[:, problem.edges[:, 1]]
    crossing = edges_in @ degree.crossing[:, 0] + edges_out @ degree.crossing[:, 1]
    return Coverings(degree, answer, bound, crossing, member @ degree.parameters, need, base)


def _problem(
    problem: PiperProblem, pairs: Pairs, coverings: list[Coverings], limit: float, *, exact: bool
) -> PipelineProblem:
    """Candidate stages as arrays; under a finite ``limit`` only what may belong to a pipeline as fast, solved
    exactly.
    """
    # The least device-seconds of every node, to know what work a stage leaves to the other devices.
    lightest = np.min([c.degree.time * c.degree.tensor for c in coverings], axis=0)
    left_over = lightest.sum() - pairs.member @ lightest
    tables = []
    for kind, covering in enumerate(coverings):
        answer, bound = (
            _solved(problem, pairs, covering, left_over, limit) if exact else (covering.answer, covering.bound)
        )
        tensor = covering.degree.tensor
        for data in _data_degrees(problem, tensor):
            own = tensor * data
            most = 1 + -(-(problem.devices - own) // data)
            fixed = _communication(problem, covering, data)[:, None]
            seconds = answer[:, :most] / data + fixed
            bounds = bound[:, :most] / data + fixed
            bounds = np.where(bounds <= limit * (1 + 1e-12), bounds, np.inf)
            useful = (left_over <= limit * (problem.devices - own) * (1 + 1e-12)) | ~np.isfinite(limit)
            useful &= np.isfinite(bounds[:, 0])
            tables.append(
                StageTable(
                    pairs.start[useful], pairs.end[useful], own, seconds[useful], bounds[useful], label=kind, share=data
                )
            )
    return PipelineProblem(problem.name, pairs.ideals, problem.devices, pack(tables), THROUGHPUT)


def _data_degrees(problem: PiperProblem, tensor: int) -> list[int]:
    return [d for d in range(1, problem.devices // tensor + 1) if problem.batch % d == 0]


def _communication(problem: PiperProblem, covering: Coverings, data: int) -> Floats:
    """Seconds per sample of transfers between stages and of gradient sums, per pair."""
    gradients = 4 * (data - 1) * covering.parameters / data / problem.batch
    return (2 * covering.crossing / data + gradients) / problem.bandwidth


def _solved(
    problem: PiperProblem, pairs: Pairs, covering: Coverings, left_over: Floats, limit: float
) -> tuple[Floats, Floats]:
    """The coverings that matter under the limit, exactly; what cannot matter is left as bounded."""
    answer, bound = covering.answer.copy(), covering.bound.copy()
    tensor = covering.degree.tensor
    for held in range(1, answer.shape[1] + 1):
        column = held - 1
        open_ = np.isfinite(answer[:, column]) & (bound[:, column] < answer[:, column])
        if not open_.any():
            continue
        matters = np.zeros(len(open_), dtype=bool)
        for data in _data_degrees(problem, tensor):
            own = tensor * data
            if held > 1 + -(-(problem.devices - own) // data):
                continue
            fixed = _communication(problem, covering, data)
            fits = bound[:, column] / data + fixed <= limit
            fits &= left_over <= limit * (problem.devices - own) * (1 + 1e-12)
            matters |= fits
        which = np.nonzero(open_ & matters)[0]
        if len(which):
            nodes, costs, gains = _items(covering.degree, held)
            paid, relaxed = cheapest_covers(
                costs,
                gains,
                np.ascontiguousarray(pairs.member[:, nodes]),
                which,
                covering.need[which, column],
                MOST_VISITS,
            )
            answer[which, column] = covering.base[which] + paid
            bound[which, column] = covering.base[which] + relaxed
    return answer, bound


def stage_rows(problem: PiperProblem, stages: Pipeline) -> list[dict[str, Any]]:
    """The stages in words: nodes, degrees, which nodes recompute, and the two sides of the memory limit."""
    pairs = pairs_of_ideals(problem)
    rows = []
    for stage in stages:
        p = int(np.nonzero((pairs.start == stage.start) & (pairs.end == stage.end))[0][0])
        degree = problem.degrees[stage.label]
        second = recomputed(problem, pairs.member[p], stage)
        held = degree.memory_held - degree.less_held * second
        fixed = degree.memory_fixed - degree.less_fixed * second
        rows.append(
            {
                "nodes": np.nonzero(pairs.member[p])[0].tolist(),
                "devices": stage.devices,
                "tensor": degree.tensor,
                "data": stage.devices // degree.tensor,
                "holds": stage.holds,
                "recomputed": np.nonzero(second)[0].tolist(),
                "seconds": stage.seconds,
                "memory": float((pairs.member[p] * (held * stage.holds + fixed)).sum()),
            }
        )
    return rows


def recomputed(problem: PiperProblem, member: np.ndarray, stage: PlacedStage) -> np.ndarray:
    """Which nodes of a stage run their second way."""
    degree = problem.degrees[stage.label]
    nodes, costs, gains = _items(degree, stage.holds)
    inside = member[nodes]
    excess = float((member * (degree.memory_held * stage.holds + degree.memory_fixed)).sum()) - problem.memory
    _, _, chosen = cheapest_cover(costs[inside], gains[inside], excess, MOST_VISITS)
    second = np.zeros(len(problem.nodes), dtype=bool)
    second[nodes[inside][chosen]] = True
    return second
