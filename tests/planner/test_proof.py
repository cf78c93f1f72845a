"""What is proved holds: no candidate lies below a bound, a wrong bound is noticed, and a proof says what it is about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright
from shardwright.cluster import Mesh, parse_cluster
from shardwright.errors import Infeasible
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.planner.outcomes import Bounds
from shardwright.planner.proving import prove
from shardwright.planner.restate import restate
from shardwright.planner.trials import Found, Trials
from shardwright.plans import Plan, Proof, SearchSpace, from_json, to_json
from shardwright.plans.proof import STEP, SUM
from shardwright.plans.proof_text import proof_text, warnings_text
from shardwright.search.alternatives import alternatives
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
    assert 0 < plan.proof.sum_bound <= plan.prediction.sum_seconds * (1 + 1e-9)
    assert 0 < plan.proof.step_bound <= plan.prediction.step_seconds * (1 + 1e-9)
    assert plan.proof.sum_bound <= plan.proof.cost
    for candidate in plan.candidates:
        if candidate.prediction is not None and candidate.prediction.fits and plan.search == "auto":
            assert plan.proof.sum_bound <= candidate.prediction.sum_seconds * (1 + 1e-9)
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
        assert tight.proof.sum_bound >= free.proof.sum_bound * (1 - 0.011)
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
    assert proof_text(row).partition("Over ")[2].startswith("all-row-greedy plans only")
    assert proof_text(free).partition("Over ")[2].startswith("all plans that fit")
    assert "ring attention" in proof_text(free) and "outer 2 x inner 4" in proof_text(free)
    (own, _), (every, _) = row.proof.bounds, free.proof.bounds
    assert own.space.contains(row) and not own.space.contains(free)
    assert every.space.contains(row) and every.space.contains(free)
    assert free.prediction.step_seconds < row.prediction.step_seconds
    assert free.proof.sum_bound <= row.prediction.sum_seconds
    sound(row)


def test_a_bound_that_a_candidate_contradicts_is_dropped_and_the_plan_stays(
    gpt: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raise what a search proves to just above a plan: the plan is delivered without a bound and says so."""
    plan = planned(gpt, baselines=(), search="data-parallel")
    assert not plan.proof.dropped and warnings_text(plan) == []
    for quantity in (SUM, STEP):
        above = 1.002 * getattr(plan.prediction, f"{quantity}_seconds")
        monkeypatch.setattr(Trials, "floor", lambda *_, above=above, **__: above)
        again = planned(gpt, baselines=(), recompute="none", search="data-parallel")
        assert again.prediction == plan.prediction
        assert again.proof.least(quantity) == 0.0
        [dropped] = [one for one in again.proof.dropped if one.bound.quantity == quantity]
        assert dropped.bound.value >= above > dropped.seconds and dropped.name == "data-parallel"
        assert dropped.bound.space.contains(again)
        assert from_json(to_json(again)).proof == again.proof
        [warning] = [text for text in warnings_text(again) if text.startswith(f"No bound on the {quantity}")]
        assert "Please report it" in warning and "\n" not in warning
    step_only = replace(plan, proof=plan.proof.silent(plan.proof.bounds[1]))
    assert "no bound on the sum" in proof_text(step_only)


def test_a_dropped_bound_leaves_a_report_with_all_that_is_needed_to_look_into_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(Trials, "floor", lambda *_, **__: 1e3)
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), torch.empty(8, 64)
    found = shardwright.plan(model, (x,), cluster="1xH200", baselines=())
    assert found.proof.step_bound == found.proof.sum_bound == 0.0
    [path] = (tmp_path / "reports").iterdir()
    reported = Plan.load(path)
    assert reported.proof.dropped == found.proof.dropped and reported.prediction == found.prediction
    assert reported.cluster == found.cluster and reported.graph().ops
    told = [text for text in caplog.messages if "No bound on the" in text]
    assert len(told) == 2 and all(str(path) in text for text in told)
    assert proof_text(found).startswith("Nothing is proved about all plans that fit")


def test_the_check_looks_at_every_candidate_that_fits(gpt: Graph, watched: tuple[Plan, list[Found]]) -> None:
    plan, seen = watched
    p, space = plan.prediction, plan.proof.bounds[0].space

    def found(**changes: object) -> Found:
        said = replace(p, **changes)  # type: ignore[arg-type]
        return replace(seen[0], prediction=said, exact=True)

    def plan_of(one: Found) -> Plan:
        assert one.prediction is not None
        return replace(plan, prediction=one.prediction)

    def proved(bounds: Bounds, *candidates: Found, within: SearchSpace = space) -> Proof:
        return prove(within, bounds, candidates, 1.0, plan_of)

    exact = Bounds(p.sum_seconds, p.step_seconds)
    kept = proved(exact, found(), found(sum_seconds=2 * p.sum_seconds))
    assert (kept.step_bound, kept.sum_bound, kept.dropped) == (p.step_seconds, p.sum_seconds, ())
    assert kept.optimal
    for quantity in (SUM, STEP):
        below = found(**{f"{quantity}_seconds": 0.998 * getattr(p, f"{quantity}_seconds")})
        left = proved(exact, found(), below, found())
        assert [one.bound.quantity for one in left.dropped] == [quantity]
        assert left.least(quantity) == 0.0 and left.least(STEP if quantity == SUM else SUM) > 0.0
        outside = proved(exact, found(), below, within=replace(space, microbatches=(2,)))
        assert not outside.dropped and outside.least(quantity) > 0.0  # of which the bound does not speak
    near = proved(Bounds(0.9 * p.sum_seconds, 0.9 * p.step_seconds), found())
    assert not near.optimal and near.gap == pytest.approx(1 / 9)


def test_a_bound_of_half_the_devices_that_was_dropped_is_dropped_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proof covers both; the warning goes with the plan whichever of them it is."""
    floor = Trials.floor

    def above(self: Trials, mesh: Mesh, *args: object, **more: object) -> float:
        wrong = mesh.devices == 1 and more.get("limited", True)
        return floor(self, mesh, *args, **more) * (100.0 if wrong else 1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(Trials, "floor", above)
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 1)), torch.empty(64, 512)
    found = plan_graph(capture(model, (x,), {}), parse_cluster("2xH200"), Options(baselines=()))
    assert not found.proof.sum_bound and not found.proof.step_bound
    assert {one.bound.quantity for one in found.proof.dropped} == {SUM, STEP}
    assert {one.bound.space.meshes for one in found.proof.dropped} == {((("gpu", 1),),)}
    assert "axis of gpu 2 / gpu 1," in proof_text(found) or "axis of gpu 1 / gpu 2," in proof_text(found)


class Repeated(nn.Module):
    """Positions repeated for every head, as DeBERTa does: the view is a copy, and its gradient is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.project = nn.Parameter(torch.empty(4, 128, 64)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.project(x) * self.project(self.table).repeat(8, 1, 1)).float().square().mean()


def test_the_bound_of_a_model_that_repeats_a_tensor_lies_below_its_plan() -> None:
    with torch.device("meta"):
        graph = capture(Repeated(), (torch.empty(32, 128, 64),), {})
    plan = planned(graph, "1xH200", baselines=())
    sound(plan)
    assert plan.proof.sum_bound == pytest.approx(plan.prediction.sum_seconds, rel=0.2)


@pytest.mark.parametrize("cluster", ["1xH200", "2xA100-40GB"])
def test_no_option_of_an_operator_is_said_to_total_less_than_is_proved(cluster: str) -> None:
    """Weights read twice: what adding up their gradients takes is in the bound, so it is in the totals of a page too."""
    with torch.device("meta"):
        graph = capture(Repeated(), (torch.empty(32, 128, 64),), {})
    plan = planned(graph, cluster, baselines=(), gap=0.0)
    sound(plan)
    stated = restate(plan, graph)
    choice = stated.choice(plan.stages[0].strategy)
    for op in graph.ops:
        node = stated.stands_for["op", op.name]
        for row in alternatives(stated, choice, node):
            assert row.total_seconds >= plan.proof.sum_bound * (1 - 1e-9), op.name


def test_the_fastest_of_all_candidates_is_the_plan(watched: tuple[Plan, list[Found]]) -> None:
    """Every candidate that was simulated and fits is noted; none of them is faster than the plan."""
    plan, seen = watched
    fitting = [found.seconds for found in seen if found.fits]
    assert len(set(fitting)) > 3
    assert plan.prediction.step_seconds == min(fitting)


def test_where_there_is_nothing_to_choose_the_bound_is_the_plan() -> None:
    """Nothing is slack on one calibrated device: a bound raised by any share would lie above the only plan there is."""
    with torch.device("meta"):
        model, x = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 1)), torch.empty(64, 512)
    plan = planned(capture(model, (x,), {}), "1xH200", baselines=())
    assert plan.proof.optimal and plan.proof.cost == plan.prediction.sum_seconds
    assert plan.proof.sum_bound == pytest.approx(plan.proof.cost, rel=1e-9)
