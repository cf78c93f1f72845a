"""What is proved holds: no candidate lies below a bound, a wrong bound is noticed, and a proof says what it is about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from shardwright.cluster import parse_cluster
from shardwright.errors import Infeasible, ProofError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.planner.outcomes import Bounds
from shardwright.planner.proving import check, proof
from shardwright.planner.trials import Found, Trials
from shardwright.plans import Plan
from shardwright.zoo.reference import resolve


def captured(reference: str, batch: int | None = None, seq: int | None = None, dtype: str | None = None) -> Graph:
    resolved = resolve(reference, batch=batch, seq=seq, dtype=dtype)
    return capture(resolved.model, resolved.args, resolved.kwargs)


@pytest.fixture(scope="module")
def gpt() -> Graph:
    return captured("gpt:layers=2,width=1024,heads=16,vocab=8192", 16, 512, "bfloat16")


def planned(graph: Graph, cluster: str = "8xA100-40GB", **options: object) -> Plan:
    return plan_graph(graph, parse_cluster(cluster), Options(fewer_devices=False, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def watched(gpt: Graph) -> tuple[Plan, list[Found]]:
    """The plan where there is as much memory as the devices have, and every candidate that was simulated meanwhile."""
    seen: list[Found] = []
    tried, keeping = Trials.tried, Trials.keeping

    def noted(self: Trials, *args: object) -> Found:
        seen.append(tried(self, *args))  # type: ignore[arg-type]
        return seen[-1]

    def noted_too(self: Trials, *args: object) -> Iterator[Found]:
        for kept in keeping(self, *args):  # type: ignore[arg-type]
            seen.append(kept)
            yield kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trials, "tried", noted)
        patch.setattr(Trials, "keeping", noted_too)
        return planned(gpt), seen


def sound(plan: Plan) -> None:
    assert 0 < plan.proof.lower_bound <= plan.prediction.sum_seconds * (1 + 1e-9)
    assert 0 < plan.proof.step_bound <= plan.prediction.step_seconds * (1 + 1e-9)
    assert plan.proof.lower_bound <= plan.proof.cost
    for candidate in plan.candidates:
        if candidate.prediction is not None and candidate.prediction.fits and plan.search == "auto":
            assert plan.proof.lower_bound <= candidate.prediction.sum_seconds * (1 + 1e-9)
            assert plan.prediction.step_seconds <= candidate.prediction.step_seconds


def test_the_bound_of_bert_lies_below_its_plan() -> None:
    """The plan keeps gathered parameters and shares bundles; its sum was once a quarter below its bound."""
    bert = captured("bert:layers=2,vocab=8192", 128, 128, "bfloat16")
    sound(planned(bert, "8xH200", memory_limit=0.7e9))


def test_with_less_memory_the_bound_is_still_one_of_the_problem_that_was_asked(gpt: Graph) -> None:
    """A bound under a limit holds for what fits into it, however much lower the search had to look."""
    free = planned(gpt, baselines=(), max_axes=1)
    for share in (0.95, 0.85, 0.75):
        limit = share * free.prediction.memory_bytes
        try:
            tight = planned(gpt, baselines=(), max_axes=1, gap=0.0, memory_limit=limit)
        except Infeasible:
            continue
        sound(tight)
        assert tight.prediction.memory_bytes <= limit
        assert tight.proof.lower_bound >= free.proof.lower_bound * (1 - 0.011)
        assert not tight.proof.optimal or tight.proof.cost <= tight.prediction.sum_seconds


def test_less_memory_never_finds_what_more_memory_missed(gpt: Graph, watched: tuple[Plan, list[Found]]) -> None:
    tight = [planned(gpt, memory_limit=gb * 1e9) for gb in (0.26, 0.23)]
    steps = [plan.prediction.step_seconds for plan in (watched[0], *tight)]
    assert steps == sorted(steps)


def test_the_plan_is_no_slower_than_any_recipe_by_name() -> None:
    llama = captured("llama:layers=2,vocab=8000,width=1024,heads=8", 16, 256, "bfloat16")
    found = planned(llama, "8xH200").prediction.step_seconds
    for name in ("zero-1", "zero-2", "megatron-sp", "equal-chop", "no-reductions"):
        assert found <= planned(llama, "8xH200", search=name, baselines=()).prediction.step_seconds * (1 + 1e-9), name


def test_a_recipe_proves_things_about_itself_only() -> None:
    small = captured("gpt:small,layers=1", 8)
    row, free = (planned(small, "8xH200", search=s, baselines=(), recompute="none") for s in ("all-row-greedy", "auto"))
    assert row.proof.scope.startswith("all-row-greedy plans only")
    assert free.proof.scope.startswith("all plans that fit")
    assert "ring attention" in free.proof.scope and "gpu0 2 x gpu1 4" in free.proof.scope
    assert free.prediction.step_seconds < row.prediction.step_seconds
    assert free.proof.lower_bound <= row.prediction.sum_seconds
    sound(row)


def test_a_bound_that_a_candidate_contradicts_is_refused(gpt: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise what a search proves to just above a plan: planning must not go on."""
    plan = planned(gpt, baselines=(), search="data-parallel")
    for quantity in ("sum_seconds", "step_seconds"):
        above = 1.002 * getattr(plan.prediction, quantity)
        monkeypatch.setattr(Trials, "floor", lambda *_, above=above, **__: above)
        with pytest.raises(ProofError, match="below the bound"):
            planned(gpt, baselines=(), recompute="none", search="data-parallel")


def test_the_check_looks_at_every_candidate_that_fits(watched: tuple[Plan, list[Found]]) -> None:
    plan, _ = watched
    p = plan.prediction

    def found(**changes: object) -> Found:
        return Found("auto", plan.mesh, None, replace(p, **changes))  # type: ignore[arg-type]

    exact = Bounds(p.sum_seconds, p.step_seconds)
    check(exact, [found(), found(sum_seconds=2 * p.sum_seconds)])
    for changes in ({"sum_seconds": 0.998 * p.sum_seconds}, {"step_seconds": 0.998 * p.step_seconds}):
        with pytest.raises(ProofError, match="below the bound"):
            check(exact, [found(), found(**changes)])
    proved = proof(Bounds(0.9 * p.sum_seconds, 0.9 * p.step_seconds), [found()], 1.0, "here")
    assert not proved.optimal and proved.gap == pytest.approx(0.1)
    assert proof(exact, [found()], 1.0, "here").optimal


def test_the_fastest_of_all_candidates_is_the_plan(watched: tuple[Plan, list[Found]]) -> None:
    """Every candidate that was simulated and fits is noted; none of them is faster than the plan."""
    plan, seen = watched
    fitting = [found.prediction.step_seconds for found in seen if found.prediction.fits]
    assert len(set(fitting)) > 3
    assert plan.prediction.step_seconds == min(fitting)


def test_where_there_is_nothing_to_choose_the_bound_is_the_plan() -> None:
    """Nothing is slack on one calibrated device: a bound raised by any share would lie above the only plan there is."""
    with torch.device("meta"):
        model, x = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 1)), torch.empty(64, 512)
    plan = planned(capture(model, (x,), {}), "1xH200", baselines=())
    assert plan.proof.optimal and plan.proof.cost == plan.prediction.sum_seconds
    assert plan.proof.lower_bound == pytest.approx(plan.proof.cost, rel=1e-9)
