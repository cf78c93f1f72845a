"""The composition against trying everything, on random candidates."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import Infeasible, ProblemError
from shardwright.schedules import Action, Schedule, pipeline, run
from shardwright.search.joint._kernels import last_backwards
from shardwright.search.joint.compose import compose, may_be_below, no_schedule_below
from shardwright.search.joint.orders import order_of
from shardwright.search.joint.problem import (
    THROUGHPUT,
    Candidates,
    Objective,
    PipelineProblem,
    StageTable,
    filled_and_drained,
    pack,
    step_seconds,
)

SECONDS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 5.0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[PipelineProblem, list[StageTable]]:
    cuts, devices = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    tables = []
    for _ in range(draw(st.integers(1, 4))):
        pairs = [p for p in itertools.combinations(range(cuts), 2) if draw(st.booleans())] or [(0, cuts - 1)]
        share = draw(st.integers(1, 2))
        rows = [sorted(draw(SECONDS) for _ in range(4)) for _ in pairs]
        for row in rows:
            for held in range(draw(st.integers(1, 4)), 4):
                row[held] = np.inf
        seconds = np.array(rows)
        bound = seconds - draw(st.sampled_from([0.0, 0.25]))
        tables.append(
            StageTable(
                np.array([a for a, _ in pairs]),
                np.array([b for _, b in pairs]),
                draw(st.integers(1, devices)),
                seconds,
                bound,
                label=len(tables),
                share=share,
                align=draw(st.sampled_from([1, 1, 2])),
                low=draw(st.sampled_from([0, 0, 1])),
                high=draw(st.sampled_from([devices, max(1, devices - 1)])),
                closing=np.full(len(pairs), draw(st.sampled_from([0.0, 2.0]))),
                far_in=np.full(len(pairs), draw(st.sampled_from([0.0, 0.75]))),
                far_out=np.full(len(pairs), draw(st.sampled_from([0.0, 0.5]))),
            )
        )
    far = np.array([draw(st.booleans()) for _ in range(devices + 1)])
    objective = draw(st.sampled_from([THROUGHPUT, filled_and_drained(4), Objective(2.0, 0.5)]))
    return PipelineProblem("random", cuts, devices, pack(tables), objective, far), tables


def every_pipeline(problem: PipelineProblem, tables: list[StageTable], key: str):  # type: ignore[no-untyped-def]
    """(seconds, closing, micro-batches held, each per stage) of every pipeline, from the last stage backwards, by the letter
    of the rules.
    """

    def extend(cut: int, devices: int, shares: int, *lists: list[float]):  # type: ignore[no-untyped-def]
        if cut == 0:
            yield tuple(list(reversed(one)) for one in lists)
            return
        for table in tables:
            for row in range(len(table.start)):
                used = devices + table.devices
                if table.end[row] != cut or used > problem.devices or devices % table.align:
                    continue
                if devices < table.low or used > table.high:
                    continue
                held = 1 + -(-shares // table.share)
                if held > table.seconds.shape[1]:
                    continue
                assert table.far_in is not None and table.far_out is not None and table.closing is not None
                seconds = min(getattr(table, key)[row, held - 1 :])
                if not np.isfinite(seconds):
                    continue
                seconds += table.far_out[row] * problem.far[devices] + table.far_in[row] * problem.far[used]
                yield from extend(
                    int(table.start[row]),
                    used,
                    shares + table.share,
                    *([*one, more] for one, more in zip(lists, (seconds, table.closing[row], held), strict=True)),
                )

    yield from extend(problem.cuts - 1, 0, 0, [], [], [])


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_composition_is_the_best_of_all(drawn: tuple[PipelineProblem, list[StageTable]]) -> None:
    problem, tables = drawn
    objective = problem.objective
    plain = {
        key: [
            objective.slowest * max(times) + objective.total * sum(times)
            for times, _, _ in every_pipeline(problem, tables, key)
        ]
        for key in ("seconds", "bound")
    }
    if not plain["seconds"]:
        with pytest.raises(Infeasible, match="fits on"):
            compose(problem)
        return
    found = compose(problem)
    assert found.cost == pytest.approx(min(plain["seconds"]), rel=1e-12)
    assert found.cost == pytest.approx(step_seconds(found.answer, objective))
    assert found.lower_bound == pytest.approx(min(plain["bound"]), rel=1e-12)
    assert found.answer[0].start == 0 and found.answer[-1].end == problem.cuts - 1
    assert all(a.end == b.start for a, b in itertools.pairwise(found.answer))
    assert sum(stage.devices for stage in found.answer) <= problem.devices


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 9))
def test_no_step_of_any_pipeline_is_below_the_bound(
    drawn: tuple[PipelineProblem, list[StageTable]], microbatches: int
) -> None:
    """Each is timed as 1F1B that holds what its stages were priced for, and in orders that hold no more."""
    problem, tables = drawn
    bound, steps = no_schedule_below(problem, microbatches, 9), [np.inf]
    for times, closings, held in every_pipeline(problem, tables, "bound"):
        ends = last_backwards(np.array(times), microbatches, np.minimum(held, microbatches))
        steps.append(float((ends + closings).max()))
        for order in (order_of(name, len(times), microbatches) for name in ("zb-h1", "zb-h2")):
            if all(own <= most for own, most in zip(order.in_flight, held, strict=True)):
                steps.append(float((order.ends(times) + closings).max()))
    assert bound <= min(steps) * (1 + 1e-12)
    assert no_schedule_below(problem, microbatches, 1) <= bound  # with room for any number of micro-batches


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0, 1.0), (1.0, 0.98, 0.96, 0.94), (1.0, 0.9, 0.9), (1.0, 0.5)])
def test_stages_that_get_lighter_to_the_end_are_bounded_by_what_they_wait_for(seconds: tuple[float, ...]) -> None:
    """Each holds as many as there are stages and has no room for more: the first idles until the first one is back, and
    where backward passes are split, nothing else idles."""
    count = len(seconds)
    tables = [
        StageTable(np.array([i]), np.array([i + 1]), 1, times, times)
        for i, one in enumerate(seconds)
        for times in [np.array([[one] * count + [np.inf]])]
    ]
    problem = PipelineProblem("a chain", count + 1, count, pack(tables), filled_and_drained(8))
    step = float(order_of("zb-h1", count, 8).ends(seconds).max())
    assert step < float(last_backwards(np.array(seconds), 8, np.arange(count, 0, -1)).max())
    assert 0.98 * step <= no_schedule_below(problem, 8, count + 1) <= step * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_order_of_passes_is_below_the_bound(data: st.DataObject) -> None:
    """Passes of random stages in random orders that hold no more than they may, backward passes split."""
    count, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    seconds = [data.draw(st.integers(1, 9)) / 3.0 for _ in range(count)]
    held = [data.draw(st.integers(1, 4)) for _ in range(count)]
    tables = [
        StageTable(np.array([i]), np.array([i + 1]), 1, times, times)
        for i, one in enumerate(seconds)
        for times in [np.array([[one] * held[i] + [np.inf] * (5 - held[i])])]
    ]
    problem = PipelineProblem("a chain", count + 1, count, pack(tables), filled_and_drained(microbatches))
    draws, done, orders = data.draw(st.randoms(use_true_random=False)), set[Action](), [[] for _ in range(count)]
    left = {Action(s, kind, i) for s in range(count) for kind in "FIW" for i in range(microbatches)}

    def ready(action: Action) -> bool:
        stage, kind, i = action
        if kind == "W":
            return Action(stage, "I", i) in done
        if kind == "I":
            return Action(stage, "F", i) in done and (stage == count - 1 or Action(stage + 1, "I", i) in done)
        there = sum({"F": 1, "I": 0, "W": -1}[one.kind] for one in orders[stage])
        return there < held[stage] and (stage == 0 or Action(stage - 1, "F", i) in done)

    while left:
        action = draws.choice(sorted(one for one in left if ready(one)))
        left.remove(action)
        done.add(action)
        orders[action.stage].append(action)
    thirds = [one / 3.0 for one in seconds]
    work = pipeline(range(count), microbatches, forward=thirds, inputs=thirds, weights=thirds)
    step = run(Schedule(tuple(map(tuple, orders))), work).makespan
    assert no_schedule_below(problem, microbatches, 5) <= step * (1 + 1e-12)


def test_a_stage_that_leads_backwards_is_refused() -> None:
    one = np.ones((1, 1))
    with pytest.raises(ProblemError, match="back to cut 0"):
        PipelineProblem("odd", 2, 1, pack([StageTable(np.array([1]), np.array([0]), 1, one, one)]), THROUGHPUT)


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([0.7, 1.0, 1.3]))
def test_what_is_dropped_belongs_to_no_better_pipeline(
    drawn: tuple[PipelineProblem, list[StageTable]], factor: float
) -> None:
    problem, _ = drawn
    try:
        cost = factor * compose(problem).cost
    except Infeasible:
        return
    useful = may_be_below(problem, cost)
    rows = problem.candidates
    bounded = rows._replace(
        seconds=np.where(useful, rows.bound, rows.bound + 1000.0),
        bound=np.where(useful, rows.bound, rows.bound + 1000.0),
    )
    before = compose(replace(problem, candidates=rows._replace(seconds=rows.bound))).cost
    try:
        after = compose(replace(problem, candidates=_sorted(bounded))).cost
    except Infeasible:
        after = np.inf
    assert min(cost, before) == pytest.approx(min(cost, after))


def _sorted(rows: Candidates) -> Candidates:
    """Steps must not fall: a dropped step after which a useful one comes would be dearer than that."""
    seconds = rows.seconds.copy()
    for c in range(len(rows.start)):
        a, b = rows.first_step[c], rows.first_step[c + 1]
        seconds[a:b] = np.minimum.accumulate(seconds[a:b][::-1])[::-1]
    return rows._replace(seconds=seconds, bound=seconds)
