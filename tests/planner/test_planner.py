"""The whole way from a model to a plan: at least as good as every baseline that fits, and honest about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import zoo
from shardwright.cluster import Mesh, parse_cluster
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.frontend import capture
from shardwright.graph.repeats import block_paths
from shardwright.planner import Options, plan, plan_graph, planning
from shardwright.planner.outcomes import Outcome, search_by_name
from shardwright.planner.trials import Trials
from shardwright.plans import Plan
from shardwright.search.baselines import BASELINES
from shardwright.search.conditions import LEAST_MEMORY
from shardwright.zoo.reference import resolve


@pytest.mark.parametrize(
    ("reference", "cluster"), [("gpt:small", "4xH100"), ("alexnet:small", "2xH100"), ("rnnlm:small", "2xH100")]
)
def test_the_found_plan_beats_every_baseline_that_fits(reference: str, cluster: str) -> None:
    """On meshes of one and two axes; of other models, on the cluster that has only one."""
    resolved = resolve(reference, batch=8)
    made = plan(resolved.model, resolved.args, resolved.kwargs, cluster=cluster, reference=reference)
    for candidate in made.candidates:
        if candidate.prediction is not None and candidate.prediction.fits:
            assert made.prediction.step_seconds <= candidate.prediction.step_seconds * (1 + 1e-9), candidate.name


def test_a_model_that_fits_nowhere_says_so() -> None:
    with torch.device("meta"):
        model, x = torch.nn.Linear(400_000, 400_000), torch.empty(8, 400_000)
    with pytest.raises(Infeasible, match="fits") as caught:
        plan(model, (x,), cluster="2xH100")
    assert "more devices" in caught.value.remedy


def test_memory_can_be_asked_for() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(6)))
        x = torch.empty(8192, 4096)
    free = plan(model, (x,), cluster="8xH100", search="fsdp")
    limit = 0.9 * plan(model, (x,), cluster="8xH100", search="data-parallel").prediction.memory_bytes
    assert free.prediction.memory_bytes < limit
    assert plan(model, (x,), cluster="8xH100", memory_limit=limit).prediction.memory_bytes <= limit
    with pytest.raises(Infeasible):
        plan(model, (x,), cluster="8xH100", search="data-parallel", memory_limit=limit)


def test_an_unknown_search_is_refused_before_any_work() -> None:
    with pytest.raises(ShardwrightError, match="fsdq"):
        Options(search="fsdq")


def test_blocks_are_recomputed_only_where_nothing_else_fits(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, args, kwargs = zoo.build("gpt", layers=4, width=256, heads=4, seq=256, vocab=256, batch=64)
        graph = capture(model, args, kwargs)

    def planned(limit: float | None = None, recompute: str = "auto") -> Plan:
        options = Options(baselines=("fsdp",), fewer_devices=False, memory_limit=limit, recompute=recompute)
        return plan_graph(graph, parse_cluster("2xH100"), options)

    free = planned()
    assert free.stages[0].strategy.recomputed == ()
    assert not any("recomputed" in note for note in free.notes)
    tight = 0.6 * free.prediction.memory_bytes
    with pytest.raises(Infeasible):
        planned(tight, "none")
    small = planned(tight)
    most = small.stages[0].strategy.recomputed
    assert len(most) > 2 and most == block_paths(graph)[: len(most)] == tuple(f"blocks.{n}" for n in range(len(most)))
    assert any(f"{len(most)} blocks" in note and "recomputed" in note for note in small.notes)
    assert small.prediction.fits
    assert small.prediction.memory_bytes <= tight
    less_tight = planned(0.8 * free.prediction.memory_bytes)
    some = less_tight.stages[0].strategy
    assert 0 < len(some.recomputed) < 4 and some.recomputed == block_paths(graph)[: len(some.recomputed)]
    assert some.lightly <= set(some.recomputed) and less_tight.prediction.fits
    assert free.prediction.step_seconds < less_tight.prediction.step_seconds < small.prediction.step_seconds
    assert any(bound.space.contains(less_tight) for bound in less_tight.proof.bounds)
    assert less_tight.proof.step_bound <= free.proof.step_bound  # which holds in any memory
    least = planned(0.5 * free.prediction.memory_bytes).stages[0].strategy  # too little for all of them lightly
    wholly = [path for path in least.recomputed if path not in least.lightly]
    assert wholly and tuple(wholly) == block_paths(graph)[: len(wholly)]
    # A forward pass more is at most a third more: backward is twice a forward.
    assert 1 < small.prediction.step_seconds / free.prediction.step_seconds < 4 / 3
    assert all(candidate.note for candidate in small.candidates)
    assert planned(recompute="blocks").stages[0].strategy.recomputed == block_paths(graph)
    small.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").stages[0].strategy.recomputed == small.stages[0].strategy.recomputed


def test_recipes_nobody_asked_for_are_not_searched_where_nothing_at_all_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is the same as if they had been: no recipe needs less memory than the least there is."""
    with torch.device("meta"):
        model, args, kwargs = zoo.build("gpt", layers=8, width=128, heads=4, seq=128, vocab=256, batch=64)
        graph = capture(model, args, kwargs)
    options = Options(baselines=("fsdp",), fewer_devices=False)
    free = plan_graph(graph, parse_cluster("2xH100"), options).prediction.memory_bytes
    options = replace(options, memory_limit=0.48 * free)
    searched: list[str] = []

    def noting(trials: Trials, shapes: Sequence[Mesh], name: str, *rest: Any) -> Outcome:
        searched.append(name)
        return search_by_name(trials, shapes, name, *rest)

    monkeypatch.setattr(planning, "search_by_name", noting)
    made, few = plan_graph(graph, parse_cluster("2xH100"), options), len(searched)
    assert made.stages[0].strategy.recomputed and searched[:3] == ["auto", "fsdp", "auto"]
    monkeypatch.setattr(Outcome, "impossible", property(lambda self: False, lambda self, value: None), raising=False)
    searched.clear()
    every = plan_graph(graph, parse_cluster("2xH100"), options)
    assert few < len(searched)
    assert (every.stages[0].strategy, every.prediction, every.candidates) == (
        made.stages[0].strategy,
        made.prediction,
        made.candidates,
    )


def test_an_unknown_way_to_recompute_is_refused() -> None:
    with pytest.raises(ShardwrightError, match="sometimes"):
        Options(recompute="sometimes")


def test_ignoring_memory_leaves_a_bound() -> None:
    """An infinite limit must not go to the solver for limits, which has no bound to give then."""
    resolved = resolve("gpt:small", batch=8)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    options = Options(ignore_device_memory=True, baselines=(), fewer_devices=False)
    free = plan_graph(graph, parse_cluster("4xH100"), options)
    assert 0 < free.proof.step_bound <= free.prediction.step_seconds
    assert 0 < free.proof.sum_bound <= free.prediction.sum_seconds


def test_one_device_has_no_recipes_beside_the_plan() -> None:
    resolved = resolve("gpt:small")
    made = plan(resolved.model, resolved.args, resolved.kwargs, cluster="1xH200")
    assert [candidate.name for candidate in made.candidates] == ["auto"]
    assert made.prediction.communication_bytes == 0


def test_what_needs_least_is_the_plan_where_the_search_finds_nothing_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 70B on eight devices was refused: "the smallest found needs 84.7 GB, more than the 85.3 GB of one H100"."""

    def only_the_smallest(trials: Trials, meshes: Sequence[Mesh], name: str, *rest: Any) -> Outcome:
        if name == LEAST_MEMORY:
            return search_by_name(trials, meshes, name, *rest)
        return Outcome(name, (), tuple(meshes), held_back=True)

    resolved = resolve("gpt:small", batch=8)
    graph, options = capture(resolved.model, resolved.args, resolved.kwargs), Options(max_axes=1, fewer_devices=False)
    monkeypatch.setattr(planning, "search_by_name", only_the_smallest)
    made = plan_graph(graph, parse_cluster("2xH100"), options)
    assert made.prediction.fits and 0 < made.proof.step_bound <= made.prediction.step_seconds
    with pytest.raises(Infeasible, match="the smallest found needs"):
        plan_graph(graph, parse_cluster("2xH100"), replace(options, memory_limit=0.9 * made.prediction.memory_bytes))


def test_the_fastest_recipe_is_in_the_comparison_whoever_asked():
    built = resolve("gpt:layers=2,width=256,heads=4,vocab=512", batch=16)
    gpt = capture(built.model, built.args, built.kwargs)

    def recipes(*names):
        plan = plan_graph(gpt, parse_cluster("4xH100"), Options(baselines=names, fewer_devices=False))
        told = {row.name: row.prediction for row in plan.candidates if row.name in BASELINES and row.prediction}
        return {name: p.step_seconds for name, p in told.items() if p.fits}

    every, few = recipes(*BASELINES), recipes("megatron")
    assert len(every) > 5 and set(few) - {"megatron"}
    assert min(few.values()) == pytest.approx(min(every.values()), rel=1e-9)
    assert plan_graph(gpt, parse_cluster("4xH100"), Options(baselines=())).candidates[1:] == ()
