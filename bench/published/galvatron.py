"""Galvatron's problems (Miao et al., VLDB 2023) as tables: a pipeline degree, and a strategy for every layer and the
ends.

The layers of each stage are given and equal; what is chosen is the pipeline degree, a strategy for each layer (or one
for all), one for the ends, and the largest degree G whose buffer is paid. With one strategy for all, all choices are
tried. Otherwise only how many layers of a stage run by each strategy counts, and between which classes of strategies
the stage changes; the published formula is a maximum of linear functions of these, so every (pipeline degree, G) is a
small integer program. Its own bound is the proof; the cost is the formula's.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.published.anytime import Report, nobody
from bench.published.reading import between, check, read_source
from shardwright.errors import Infeasible, ProblemError
from shardwright.records import read_record
from shardwright.search.solution import Solution

MOST_CLASSES = 6
"""Of strategies that change into each other alike; the subsets of them are listed."""


@dataclass(frozen=True)
class Strategy:
    """A way to run a layer: degrees, seconds of one micro-batch with and without the sum of gradients, megabytes by
    stage.
    """

    others_allowed: ClassVar[bool] = True
    id: str
    tp: int
    sp: int
    zero: int
    seconds_with_sync: float
    seconds_without_sync: float
    memory_mb_per_stage: tuple[float, ...]


@dataclass(frozen=True)
class Ends:
    """A way to run the embedding and the head; seconds and megabytes by stage."""

    others_allowed: ClassVar[bool] = True
    tp: int
    sp: int
    zero: int
    seconds_without_sync: tuple[float, ...]
    memory_mb_per_stage: tuple[float, ...]


@dataclass(frozen=True)
class Pipeline:
    """One pipeline degree with the layers of its stages and all ways to run them."""

    others_allowed: ClassVar[bool] = True
    pp: int
    layers_per_stage: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    ends: tuple[Ends, ...]
    buffer_mb: dict[str, float]
    transition_seconds: tuple[tuple[float, ...], ...] = ()

    @cached_property
    def classes(self) -> list[list[int]]:
        """Strategies between which a change costs nothing, either way."""
        table, found = self.transition_seconds, list[list[int]]()
        for k in range(len(self.strategies)):
            for members in found:
                if all(table[k][j] == table[j][k] == 0.0 for j in members):
                    members.append(k)
                    break
            else:
                found.append([k])
        return found


@dataclass(frozen=True)
class GalvatronProblem:
    """Tables for every pipeline degree, and what all of them have in common."""

    others_allowed: ClassVar[bool] = True
    name: str
    devices: int
    global_batch: int
    microbatches: int
    memory_limit_mb: float
    pipelines: tuple[Pipeline, ...]
    one_strategy_for_all_layers: bool = False


@dataclass(frozen=True)
class GalvatronChoice:
    """One answer: pipeline degree, per stage its strategies in their order and the layers of each, the way of the ends
    (tp, sp, zero), the largest degree, and each stage's megabytes.
    """

    pipeline: int
    layers: tuple[tuple[tuple[str, int], ...], ...]
    ends: tuple[int, int, int]
    largest_degree: int
    memory_mb: tuple[float, ...]


def read_galvatron(source: str | Path | dict[str, Any], model: str | None = None) -> GalvatronProblem:
    """The tables of one problem, checked; ``model`` names it where the file has several."""
    data = read_source(source, model)
    problem = read_record(
        GalvatronProblem, data, where="the tables are no problem of Galvatron's", error=ProblemError,
        remedy="Write them as in the published problem.",
    )  # fmt: skip
    between(problem.devices, 1, 10_000, "devices")
    between(problem.microbatches, 1, 1_000_000, "microbatches")
    between(problem.global_batch, 1, 10**9, "global_batch")
    check(bool(problem.pipelines), "pipelines is empty")
    for pipeline in problem.pipelines:
        _check_pipeline(pipeline, problem.devices)
    return problem


def _check_pipeline(pipeline: Pipeline, devices: int) -> None:
    where = f"of pp {pipeline.pp}"
    between(pipeline.pp, 1, devices, "pp")
    between(len(pipeline.strategies), 1, 100, f"the number of strategies {where}")
    between(len(pipeline.ends), 1, 100, f"the number of ends {where}")
    check(len(pipeline.layers_per_stage) == pipeline.pp, f"layers_per_stage {where} has another length")
    for count in pipeline.layers_per_stage:
        between(count, 1, 10_000, f"layers_per_stage {where}")
    for degree in pipeline.buffer_mb:
        check(degree.isdecimal() and len(degree) < 10, f"buffer_mb {where} has the degree {degree[:40]!r}")
    for one in pipeline.strategies:
        check(min(one.seconds_without_sync, one.seconds_with_sync) >= 0, f"seconds of a strategy {where} are negative")
        _check_way(one, pipeline.pp, devices, where)
    for end in pipeline.ends:
        seconds = end.seconds_without_sync
        check(
            len(seconds) == pipeline.pp and min(seconds) >= 0, f"seconds_without_sync of an end {where} are not right"
        )
        _check_way(end, pipeline.pp, devices, where)
    table, count = pipeline.transition_seconds, len(pipeline.strategies)
    if table:
        check(
            len(table) == count and all(len(row) == count for row in table), f"transition_seconds {where} is not square"
        )
        check(min(map(min, table)) >= 0, f"transition_seconds {where} are negative")


def _check_way(way: Strategy | Ends, stages: int, devices: int, where: str) -> None:
    memory = way.memory_mb_per_stage
    check(len(memory) == stages and min(memory) >= 0, f"a memory_mb_per_stage {where} is not right")
    between(way.tp, 1, devices, f"tp {where}")
    between(way.sp, 1, devices, f"sp {where}")


def solve_galvatron(problem: GalvatronProblem, report: Report = nobody) -> Solution[GalvatronChoice]:
    """The fastest choice that fits and its proof; the cost is seconds per step."""
    started = time.perf_counter()
    best: tuple[float, GalvatronChoice] | None = None
    bound = np.inf
    for pipeline in problem.pipelines:
        for degree, buffer in _degrees(problem, pipeline):
            solve = _one_for_all if problem.one_strategy_for_all_layers else _per_layer
            found, least = solve(problem, pipeline, degree, buffer)
            bound = min(bound, least)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
                report(Solution(best[1], best[0], 0.0, False, time.perf_counter() - started))
    if best is None:
        raise Infeasible(
            f"no strategies of {problem.name} fit into {problem.memory_limit_mb:g} MB.",
            "Give it more memory or more devices.",
        )
    bound = min(best[0], bound)
    optimal = bound >= best[0] * (1 - 1e-9)
    return Solution(best[1], best[0], bound, optimal, time.perf_counter() - started)


def _degrees(problem: GalvatronProblem, pipeline: Pipeline) -> list[tuple[int, float | None]]:
    """The largest degrees that may be declared, with their buffers; without tensor parallelism none is paid."""
    return [(problem.devices // pipeline.pp, None), *((int(g), mb) for g, mb in pipeline.buffer_mb.items())]


def _allowed(way: Strategy | Ends, degree: int, buffer: float | None) -> bool:
    return way.tp == 1 if buffer is None else way.tp * way.sp <= degree


Found = tuple[tuple[float, GalvatronChoice] | None, float]


def _one_for_all(problem: GalvatronProblem, pipeline: Pipeline, degree: int, buffer: float | None) -> Found:
    """All layers and the ends alike: every choice is tried."""
    best: tuple[float, GalvatronChoice] | None = None
    for layer, ends in itertools.product(pipeline.strategies, pipeline.ends):
        if (layer.tp, layer.sp, layer.zero) != (ends.tp, ends.sp, ends.zero) or not _allowed(layer, degree, buffer):
            continue
        stages = tuple(((layer.id, count),) for count in pipeline.layers_per_stage)
        found = _priced(problem, pipeline, stages, ends, degree, buffer)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best, best[0] if best else np.inf


def _priced(
    problem: GalvatronProblem, pipeline: Pipeline, stages: tuple[tuple[tuple[str, int], ...], ...], ends: Ends,
    degree: int, buffer: float | None,
) -> tuple[float, GalvatronChoice] | None:  # fmt: skip
    """The published formula's seconds of a choice, where it fits."""
    number = {one.id: k for k, one in enumerate(pipeline.strategies)}
    plain, summed, memory = [], [], []
    for i, layers in enumerate(stages):
        runs = [(pipeline.strategies[number[name]], count) for name, count in layers]
        changes = sum(
            pipeline.transition_seconds[number[a]][number[b]] for (a, _), (b, _) in itertools.pairwise(layers)
        )
        own = sum(count * one.seconds_without_sync for one, count in runs)
        plain.append(own + ends.seconds_without_sync[i] + changes)
        summed.append(sum(count * one.seconds_with_sync for one, count in runs))
        held = sum(count * one.memory_mb_per_stage[i] for one, count in runs)
        memory.append(held + ends.memory_mb_per_stage[i] + (buffer or 0.0))
    if max(memory) > problem.memory_limit_mb:
        return None
    choice = GalvatronChoice(pipeline.pp, stages, (ends.tp, ends.sp, ends.zero), degree, tuple(memory))
    return step_seconds(plain, summed, problem.microbatches), choice


def step_seconds(plain: list[float], summed: list[float], microbatches: int) -> float:
    """The published formula: two views of the pipeline, and what of the gradient sums does not hide behind earlier
    stages. By stage: seconds of a micro-batch without them, and of the layers with them.
    """
    m, stages = microbatches, len(plain)
    q, rest = min(stages - 1, m - 1), sum(plain[1:])
    by_last = sum(plain) + (m - 1) * plain[-1]
    by_first = (
        max(q * plain[0] / 3, rest / 3) + max(2 * q * plain[0] / 3, 2 * rest / 3) + plain[0] * max(0, m + 1 - stages)
    )
    late = max(summed[i] - sum(plain[: i + 1]) for i in range(stages))
    return max(by_last, by_first) + max(0.0, late)


def _per_layer(problem: GalvatronProblem, pipeline: Pipeline, degree: int, buffer: float | None) -> Found:
    """The integer program of one pipeline degree and largest degree: layers per strategy, classes used, ends, seconds."""
    import highspy

    usable = [k for k, one in enumerate(pipeline.strategies) if _allowed(one, degree, buffer)]
    ends = [j for j, one in enumerate(pipeline.ends) if _allowed(one, degree, buffer)]
    classes = [
        [k for k in members if k in usable]
        for members in (pipeline.classes if pipeline.transition_seconds else [usable])
    ]
    classes = [members for members in classes if members]
    if not usable or not ends:
        return None, np.inf
    if len(classes) > MOST_CLASSES:
        raise ProblemError(
            f"{problem.name} has {len(classes)} classes of strategies that change into each other.",
            f"At most {MOST_CLASSES} are read.",
        )
    ways = _ways_through(pipeline, classes)
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("mip_rel_gap", 0.0)
    model.setOptionValue("mip_abs_gap", 0.0)
    stages, m = range(pipeline.pp), problem.microbatches
    whole = highspy.HighsVarType.kInteger
    n = [{k: model.addVariable(0, pipeline.layers_per_stage[i], type=whole) for k in usable} for i in stages]
    used = [[model.addVariable(0, 1, type=whole) for _ in ways] for _ in stages]
    end = {j: model.addVariable(0, 1, type=whole) for j in ends}
    late, longest = model.addVariable(0, highspy.kHighsInf), model.addVariable(0, highspy.kHighsInf)
    model.addConstr(sum(end.values()) == 1)
    plain, summed = [], []
    for i in stages:
        own = [pipeline.strategies[k].seconds_without_sync * n[i][k] for k in usable]
        tails = [pipeline.ends[j].seconds_without_sync[i] * end[j] for j in ends]
        plain.append(sum([*own, *tails, *(seconds * u for u, (_, seconds, _) in zip(used[i], ways, strict=True))]))
        summed.append(sum(pipeline.strategies[k].seconds_with_sync * n[i][k] for k in usable))
        held = [pipeline.strategies[k].memory_mb_per_stage[i] * n[i][k] for k in usable]
        held += [pipeline.ends[j].memory_mb_per_stage[i] * end[j] for j in ends]
        model.addConstr(sum(held) <= problem.memory_limit_mb - (buffer or 0.0))
        model.addConstr(sum(n[i].values()) == pipeline.layers_per_stage[i])
        model.addConstr(sum(used[i]) == 1)
        for c, members in enumerate(classes):
            open_ = sum([u for u, (inside, _, _) in zip(used[i], ways, strict=True) if c in inside])
            model.addConstr(sum(n[i][k] for k in members) <= pipeline.layers_per_stage[i] * open_)
        model.addConstr(late >= summed[i] - sum(plain[: i + 1]))
    model.addConstr(longest >= sum(plain) + (m - 1) * plain[-1])
    q, rest, first = min(pipeline.pp - 1, m - 1), sum(plain[1:]), plain[0]
    for third, two in itertools.product((q * first, rest), repeat=2):
        parts = [(1 / 3) * third, (2 / 3) * two] if pipeline.pp > 1 else []
        model.addConstr(longest >= sum([*parts, max(0, m + 1 - pipeline.pp) * first]))
    model.minimize(longest + late)
    if model.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return None, np.inf
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise ProblemError(
            f"the program of {problem.name} was not solved: {model.getModelStatus()}.", "Check its numbers."
        )
    values = np.array(model.getSolution().col_value)
    stages_found = []
    for i in stages:
        inside = int(np.argmax([values[u.index] for u in used[i]]))
        order = [k for c in ways[inside][2] for k in classes[c] if values[n[i][k].index] > 0.5]
        stages_found.append(tuple((pipeline.strategies[k].id, round(values[n[i][k].index])) for k in order))
    chosen = pipeline.ends[max(ends, key=lambda j: values[end[j].index])]
    return _priced(problem, pipeline, tuple(stages_found), chosen, degree, buffer), float(
        model.getInfo().mip_dual_bound
    )


def _ways_through(pipeline: Pipeline, classes: list[list[int]]) -> list[tuple[frozenset[int], float, tuple[int, ...]]]:
    """Per set of classes: the seconds of changing from one to the next, in the cheapest order, and that order.

    To come back to a class never helps where changes keep the triangle inequality, which is checked.
    """
    if not pipeline.transition_seconds:
        return [(frozenset(range(len(classes))), 0.0, tuple(range(len(classes))))]
    cost = np.array([[pipeline.transition_seconds[a[0]][b[0]] for b in classes] for a in classes])
    for a, b in itertools.product(range(len(classes)), repeat=2):
        changes = {pipeline.transition_seconds[i][j] for i in classes[a] for j in classes[b]}
        check(a == b or len(changes) == 1, "transition_seconds differ within a class of strategies")
    check(bool((cost[:, :, None] + cost[None] >= cost[:, None, :] - 1e-12).all()), "a detour is cheaper than a change")
    found = []
    for size in range(1, len(classes) + 1):
        for inside in itertools.combinations(range(len(classes)), size):
            orders = itertools.permutations(inside)
            best = min(orders, key=lambda order: sum(cost[a, b] for a, b in itertools.pairwise(order)))
            found.append((frozenset(inside), float(sum(cost[a, b] for a, b in itertools.pairwise(best))), best))
    return found
