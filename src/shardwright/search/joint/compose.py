"""The exact composition of candidate stages into a pipeline, by a limit on the slowest stage.

Throughput alone (`Objective.total` 0): a limit can be kept or not, one recurrence each; the least limit that can be
kept is found by halving the sorted list of all stage times, so the optimum is met exactly and the next smaller time
is proved impossible.

Slowest and total: between two stage times lo < hi, no answer whose slowest stage lies in (lo, hi] costs less than
``slowest · next(lo)`` plus ``total`` times the least sum under the limit hi. Intervals are halved, best bound first,
and dropped by that bound; what remains in the end is the optimum.

Both are run a second time on the candidates' bounds where those differ from their seconds; the result bounds every
answer.
"""

from __future__ import annotations

import heapq
import time

import numpy as np

from shardwright.errors import Infeasible
from shardwright.search.joint._kernels import NEVER, ONE, least_in_flight, least_seconds, least_step, least_through
from shardwright.search.joint.problem import (
    Candidates,
    Floats,
    Ints,
    Objective,
    PipelineProblem,
    PlacedStage,
    in_flight,
    step_seconds,
)
from shardwright.search.solution import Solution

Pipeline = tuple[PlacedStage, ...]


def compose(problem: PipelineProblem, *, bounded: bool = True) -> Solution[Pipeline]:
    """The best pipeline of a problem, with a bound that holds for all of them (equal where the candidates' seconds
    are exact).

    >>> from shardwright.search.joint.problem import THROUGHPUT, PipelineProblem, StageTable, pack
    >>> seconds = np.array([[5.0, 5.0], [2.0, 2.0], [3.0, 3.0]])  # of three candidates, with one or two micro-batches held
    >>> stages = pack([StageTable(np.array([0, 0, 1]), np.array([2, 1, 2]), 1, seconds, seconds)])
    >>> found = compose(PipelineProblem("two layers", 3, 2, stages, THROUGHPUT))
    >>> found.cost, found.optimal, [(stage.start, stage.end) for stage in found.answer]
    (3.0, True, [(0, 1), (1, 2)])
    """
    started = time.perf_counter()
    rows, objective = problem.candidates, problem.objective
    solve = _least_slowest if objective.total == 0 else _least_slowest_and_total
    answer = solve(problem, rows.seconds)
    if answer is None:
        raise Infeasible(
            f"no pipeline of {problem.name} fits on {problem.devices} devices.",
            "Give it more devices or more memory per device.",
        )
    cost = step_seconds(answer, objective)
    if np.array_equal(rows.bound, rows.seconds):
        bound = cost
    elif not bounded:
        bound = 0.0
    else:
        relaxed = solve(problem, rows.bound)
        assert relaxed is not None  # the relaxation admits the answer above
        bound = min(
            cost, objective.slowest * max(s.bound for s in relaxed) + objective.total * sum(s.bound for s in relaxed)
        )
    return Solution(answer, cost, bound, bound >= cost, time.perf_counter() - started)


ANY = np.ones(1, dtype=np.int64)


def no_schedule_below(
    problem: PipelineProblem,
    microbatches: int,
    most_held: int,
    known: float = np.inf,
    *,
    needed: Ints = ANY,
    groups: int = ONE,
) -> float:
    """Seconds that no pipeline of the problem undercuts in any order of the passes of ``microbatches``, backward passes
    whole or split; at most those ``known``.

    A stage must do its m micro-batches after the first was brought to it; the fewer it holds at once (from the forward pass
    to the gradient of the weights), the longer it waits for those that are away; the gradient of the inputs of its last one
    must still be taken back through the stages before it, those of weights can wait. Its closing seconds come after them.
    Candidates that hold ``most_held`` are taken to have room for more.

    ``needed``: only orders that hold at least so many micro-batches, by the number of stages after one
    (:func:`~shardwright.search.joint.orders.least_held`). ``groups``: candidates are groups of devices that run two stages
    each, in interleaved 1F1B (``ROUND``) or ZB-V (``DOWN_AND_UP``).
    """
    return float(least_step(problem.line, problem.candidates, microbatches, most_held, known, needed, groups))


def may_be_below(problem: PipelineProblem, cost: float) -> np.ndarray:
    """Per step: whether by the bounds a pipeline that contains it may cost less than ``cost``. All others can be
    dropped.

    Every pipeline's slowest stage takes at least what the least limit that can be kept says, and its sum at least the
    least sum through the step.
    """
    rows, objective = problem.candidates, problem.objective
    none, none_closing = np.zeros(len(rows.bound), dtype=bool), np.zeros(len(rows.bound))
    shares = most_shares(problem)
    total, _ = least_seconds(problem.line, shares, rows, rows.bound, np.inf, 1.0, none_closing)
    limit = np.inf
    if objective.slowest:
        limit = (cost - objective.total * float(total[0].min())) / objective.slowest * (1 + 1e-12)
        kept, _ = least_in_flight(problem.line, rows, rows.bound, limit)
        if kept[0].min() >= NEVER:
            return none
        total, _ = least_seconds(problem.line, shares, rows, rows.bound, limit, 1.0, none_closing)
    fastest = _least_slowest(problem, rows.bound, limit)
    if fastest is None:
        return none
    least = max(stage.bound for stage in fastest)
    through = least_through(problem.line, rows, rows.bound, limit, total)
    used = np.isfinite(through)  # by a pipeline that keeps the limit
    slowest, total_through = np.maximum(least, rows.bound), np.where(used, through, 0.0)
    return used & (objective.slowest * slowest + objective.total * total_through < cost)


def most_shares(problem: PipelineProblem) -> int:
    """No pipeline's shares add up to more than this."""
    rows = problem.candidates
    if not len(rows.share):
        return 0
    per_device = float((rows.share / rows.devices).max())
    return int(min(np.floor(per_device * problem.devices + 1e-9), int(rows.share.max()) * (problem.cuts - 1)))


def _least_slowest(problem: PipelineProblem, times: Floats, limit: float = np.inf) -> Pipeline | None:
    """Halve the sorted stage times; every pipeline found is kept as the best so far, so the last one kept is the
    optimum.
    """
    rows = problem.candidates
    values = _possible_times(problem, times)
    values = values[values <= limit]
    if not len(values):
        return None
    low, high, best = -1, len(values), None  # low cannot be kept, high can (once best is known)
    while high - low > 1:
        middle = (low + high) // 2 if best is not None else len(values) - 1
        least, chosen = least_in_flight(problem.line, rows, times, values[middle])
        if least[0].min() >= NEVER:
            if best is None:
                return None
            low = middle
            continue
        best = _follow_candidates(problem, times, chosen, int(least[0].argmin()), least)
        high = int(np.searchsorted(values, max(_at(stage, times, rows) for stage in best)))
    return best


def _least_slowest_and_total(problem: PipelineProblem, times: Floats) -> Pipeline | None:
    objective = problem.objective
    values = _possible_times(problem, times)
    if not len(values):
        return None
    # The least limit that can be kept at all: below it there is nothing to look for.
    fastest = _least_slowest(problem, times)
    if fastest is None:
        return None
    rows = problem.candidates
    least = int(np.searchsorted(values, max(_at(stage, times, rows) for stage in fastest)))

    def value(pipeline: Pipeline) -> float:
        own = [_at(stage, times, rows) for stage in pipeline]
        return objective.slowest * max(own) + objective.total * sum(own)

    best, cost = fastest, value(fastest)

    def under(limit: int) -> tuple[float, float]:
        """The least sum under a limit; a better pipeline is noted on the way. And the slowest stage that it has."""
        nonlocal best, cost
        pipeline = _least_total(problem, times, values[limit])
        assert pipeline is not None  # the limit is at least the least that can be kept
        if value(pipeline) < cost:
            best, cost = pipeline, value(pipeline)
        own = [_at(stage, times, rows) for stage in pipeline]
        return sum(own), max(own)

    total, slowest = under(len(values) - 1)
    high = int(np.searchsorted(values, slowest))  # a slower stage cannot make the least sum less
    queue = [(objective.slowest * values[least] + objective.total * total, least, high, total)]
    while queue:
        bound, low, high, total = heapq.heappop(queue)
        if bound >= cost or low == high:
            # With low == high the bound is the cost of the pipeline found under that limit (noted in `under`), or more.
            if bound >= cost:
                break
            under(high)
            continue
        middle = (low + high) // 2
        below, slowest = under(middle)
        reached = int(np.searchsorted(values, slowest))
        if reached >= low:  # otherwise what was found is better than all of this half
            heapq.heappush(queue, (objective.slowest * values[low] + objective.total * below, low, reached, below))
        heapq.heappush(
            queue, (objective.slowest * values[middle + 1] + objective.total * total, middle + 1, high, total)
        )
    return best


def _possible_times(problem: PipelineProblem, times: Floats) -> Floats:
    """Everything that a stage may take, sorted: per step, and with what a slow link on either side adds."""
    rows = problem.candidates
    per_step = np.repeat(np.arange(len(rows.start)), np.diff(rows.first_step))
    parts = [times]
    if problem.far.any():
        enters, leaves = rows.far_in[per_step], rows.far_out[per_step]
        parts += [times + more for more in (enters, leaves, leaves + enters) if more.any()]
    values = np.unique(np.concatenate(parts))
    return values[np.isfinite(values)]


def _least_total(problem: PipelineProblem, times: Floats, limit: float) -> Pipeline | None:
    rows = problem.candidates
    none = np.zeros_like(times)
    value, chosen = least_seconds(problem.line, most_shares(problem), rows, times, limit, 1.0, none)
    devices, shares = np.unravel_index(int(value[0].argmin()), value[0].shape)
    if not np.isfinite(value[0, devices, shares]):
        return None
    return _follow_steps(problem, chosen, int(devices), int(shares))


def _follow_steps(problem: PipelineProblem, chosen: Ints, devices: int, shares: int) -> Pipeline:
    rows = problem.candidates
    row_of = np.searchsorted(rows.first_step, np.arange(len(rows.holds)), side="right") - 1
    stages, cut, used = [], 0, devices
    while cut < problem.cuts - 1:
        step = int(chosen[cut, devices, shares])
        c = int(row_of[step])
        devices -= int(rows.devices[c])
        shares -= int(rows.share[c])
        stages.append(_placed(problem, c, step, used - devices - int(rows.devices[c]), devices, shares))
        cut = int(rows.end[c])
    return tuple(stages)


def _follow_candidates(problem: PipelineProblem, times: Floats, chosen: Ints, devices: int, least: Ints) -> Pipeline:
    rows = problem.candidates
    stages, cut, used = [], 0, devices
    while cut < problem.cuts - 1:
        c = int(chosen[cut, devices])
        devices -= int(rows.devices[c])
        cut = int(rows.end[c])
        shares = int(least[cut, devices])
        held = in_flight(int(rows.share[c]), shares)
        first, beyond = int(rows.first_step[c]), int(rows.first_step[c + 1])
        step = first + int(np.searchsorted(rows.holds[first:beyond], held))
        stages.append(_placed(problem, c, step, used - devices - int(rows.devices[c]), devices, shares))
    return tuple(stages)


def _placed(problem: PipelineProblem, c: int, step: int, first_device: int, after: int, shares: int) -> PlacedStage:
    rows, far = problem.candidates, problem.far
    own = int(rows.devices[c])
    more = float(far[after] * rows.far_out[c] + far[after + own] * rows.far_in[c])
    return PlacedStage(
        start=int(rows.start[c]),
        end=int(rows.end[c]),
        devices=own,
        first_device=first_device,
        holds=in_flight(int(rows.share[c]), shares),
        seconds=float(rows.seconds[step]) + more,
        bound=float(rows.bound[step]) + more,
        closing=float(rows.closing[step]),
        label=int(rows.label[step]),
    )


def _at(stage: PlacedStage, times: Floats, rows: Candidates) -> float:
    return stage.seconds if times is rows.seconds else stage.bound


__all__ = ["Objective", "Pipeline", "compose", "may_be_below", "most_shares", "no_schedule_below"]
