"""The choice problem of a real model: folding, restrictions, pricing of any strategy, user constraints."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from program.steps import priced
from shardwright import zoo
from shardwright.cluster import mesh_of, parse_cluster
from shardwright.costs.gradient_addition import least_adding
from shardwright.costs.memory import ACTIVATIONS, memory
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths, span_of
from shardwright.operators import analyse
from shardwright.search.alternatives import alternatives
from shardwright.search.baselines import BASELINES, restriction
from shardwright.search.bills import LEAST
from shardwright.search.choose import evaluate, solve
from shardwright.search.constraints import constraints
from shardwright.search.formulate import describe_graph, formulate
from shardwright.search.labels import label_loops
from shardwright.search.options import EVERYTHING
from shardwright.search.recomputing import recomputation
from shardwright.search.recursive import recursive
from shardwright.simulator import simulate
from shardwright.zoo.reference import resolve

MESH = mesh_of(parse_cluster("2x4xH100"))


@pytest.fixture(scope="module")
def gpt() -> Graph:
    resolved = resolve("gpt:small,layers=4", batch=8)
    return capture(resolved.model, resolved.args, resolved.kwargs)


@pytest.fixture(scope="module")
def wide() -> Graph:
    """Its products are expensive for their size."""
    with torch.device("meta"):
        model, args, kwargs = zoo.build("gpt", layers=3, width=512, heads=8, seq=512, vocab=512, batch=64)
        return capture(model, args, kwargs)


def _search(graph: Graph, **options):
    stated = formulate(graph, MESH, **options)
    return stated, solve(stated.problem)


def test_folding_repeats_keeps_the_price_of_every_strategy(gpt: Graph) -> None:
    folded, solution = _search(gpt)
    unfolded = formulate(gpt, MESH, within=replace(EVERYTHING, fold=False))
    assert len(folded.nodes) < len(unfolded.nodes) / 2
    choice = unfolded.choice(folded.strategy(solution.answer))
    assert evaluate(unfolded.problem, choice).cost == pytest.approx(solution.cost, rel=1e-9)


def test_the_whole_space_beats_every_restriction_of_it(gpt: Graph) -> None:
    _, best = _search(gpt)
    assert best.optimal
    for name in BASELINES:
        _, found = _search(gpt, within=restriction(name, 2))
        assert found.cost >= best.cost * (1 - 1e-9), name


def test_data_parallel_cuts_only_the_batch_and_keeps_parameters_whole(gpt: Graph) -> None:
    stated, solution = _search(gpt, within=restriction("data-parallel", 2))
    strategy = stated.strategy(solution.answer)
    labels = label_loops(gpt, stated.rules)
    for op in gpt.ops:
        for loop in strategy.splits[op.name]:
            passes = loop is None or not stated.rules[op.name].by_name[loop].divides
            assert passes or labels[op.name][loop] == "batch"
    assert all(set(strategy.resting[p.tensor]) == {Replicate()} for p in gpt.parameters)
    assert not strategy.regathered


def test_fsdp_shards_and_gathers_again(gpt: Graph) -> None:
    stated, solution = _search(gpt, within=restriction("fsdp", 2))
    strategy = stated.strategy(solution.answer)
    weights = [p.tensor for p in gpt.parameters if len(gpt.tensors[p.tensor].shape) == 2]
    assert all(isinstance(place, Shard) for w in weights for place in strategy.resting[w])
    assert set(weights) <= strategy.regathered


def test_recursion_is_never_better_than_the_joint_search(gpt: Graph) -> None:
    stated, solution = _search(gpt)
    found = recursive(describe_graph(gpt), MESH)
    cost = evaluate(stated.problem, stated.choice(found)).cost
    assert np.isfinite(cost)
    assert cost >= solution.cost * (1 - 1e-9)


def test_a_memory_limit_is_respected(gpt: Graph) -> None:
    free, unlimited = _search(gpt, memory_limit=1e18)
    peak = evaluate(free.problem, unlimited.answer).peak
    tight, limited = _search(gpt, memory_limit=0.6 * peak)
    assert evaluate(tight.problem, limited.answer).peak <= 0.6 * peak
    assert limited.cost >= unlimited.cost


def test_pins_and_prohibitions(gpt: Graph) -> None:
    axes = MESH.names
    pinned = constraints(gpt, axes, ["blocks.*.feed.up.weight=S0,R"], [f"head*@{axes[0][0]}"])
    stated, solution = _search(gpt, within=pinned)
    strategy = stated.strategy(solution.answer)
    ups = [p.tensor for p in gpt.parameters if p.paths[0].endswith("feed.up.weight")]
    assert len(ups) == 4
    assert all(strategy.resting[t] == (Shard(0), Replicate()) for t in ups)
    heads = [op for op in gpt.ops if op.module.startswith("head")]
    assert heads and all(strategy.splits[op.name][0] is None for op in heads)


@pytest.mark.parametrize("pin", ["nothing=S0,R", "head*=S0", "blocks.*.feed.up.weight=X,R"])
def test_malformed_pins_are_one_sentence(gpt: Graph, pin: str) -> None:
    with pytest.raises(ShardwrightError, match="pin"):
        constraints(gpt, MESH.names, [pin], [])


def test_alternatives_are_what_the_solver_would_find_with_the_option_pinned(gpt: Graph) -> None:
    stated, solution = _search(gpt)
    op = next(o for o in gpt.ops if o.target == "aten.linear.default")
    node = stated.stands_for["op", op.name]
    rows = alternatives(stated, solution.answer, node, most=5)
    assert rows[0].chosen
    least = solution.cost + least_adding(gpt, stated.mesh)  # gradients are added up whatever is chosen
    assert rows[0].total_seconds == pytest.approx(least)
    assert all(row.total_seconds >= least * (1 - 1e-9) for row in rows)


def test_labels_follow_the_batch_through_the_model(gpt: Graph) -> None:
    rules = {op.name: analyse(op, gpt.tensors) for op in gpt.ops}
    labels = label_loops(gpt, rules)
    linears = [op for op in gpt.ops if op.target == "aten.linear.default"]
    assert linears and all("batch" in labels[op.name].values() for op in linears)


@pytest.mark.parametrize("reference", ["llama:layers=2", "alexnet"])
@pytest.mark.parametrize("name", ["auto", "fsdp", "megatron"])
def test_the_search_and_the_walk_of_a_step_agree_on_the_sum(reference: str, name: str) -> None:
    """What the search minimises is what one rank does: every event of the step is priced, nothing twice."""
    resolved = resolve(reference, batch=8)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    mesh = mesh_of(parse_cluster("8xH100"))
    stated = formulate(graph, mesh, within=EVERYTHING if name == "auto" else restriction(name, 1))
    solution = solve(stated.problem)
    assert priced(graph, stated.strategy(solution.answer), mesh).seconds == pytest.approx(solution.cost, rel=0.05)


@pytest.mark.parametrize("name", ["auto", "fsdp", "megatron", "zero-2"])
def test_they_agree_on_recomputed_blocks_too(name: str) -> None:
    """zero-2 keeps gathered parameters for backward, except those of recomputed blocks, which are gathered twice."""
    resolved = resolve("llama:layers=2", batch=8)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    mesh = mesh_of(parse_cluster("8xH100"))
    within = EVERYTHING if name == "auto" else restriction(name, 1)
    stated = formulate(graph, mesh, within=within, recompute=block_paths(graph))
    solution = solve(stated.problem)
    events = priced(graph, stated.strategy(solution.answer), mesh)
    assert events.seconds == pytest.approx(solution.cost, rel=0.02)
    assert sum(event.seconds for event in events.events if event.phase == "recompute") > 0.1 * events.seconds


def test_the_last_product_of_a_block_is_not_computed_again(gpt: Graph) -> None:
    path = block_paths(gpt)[0]
    names = [gpt.ops[index].name for index in span_of(gpt, path)]
    rules = {op.name: analyse(op, gpt.tensors) for op in gpt.ops}
    again = recomputation(gpt, (path,), "cuda", rules)
    assert again.runs == set(names[:-2])
    last = next(op for op in gpt.ops if op.name == names[-2])
    brought = {(op.name, tensor) for op in gpt.ops if op.name in names[:-2] for tensor in op.inputs}
    assert again.reads == brought | {(last.name, tensor) for tensor in last.inputs[:2]}  # its bias is not needed
    assert set(again.block) == set(names)


@pytest.mark.parametrize("name", ["data-parallel", "megatron", "fsdp"])
def test_what_is_recomputed_lightly_costs_and_holds_what_its_program_does(name: str, wide: Graph) -> None:
    mesh = mesh_of(parse_cluster("8xH100"))
    seconds, summed, held = {}, {}, {}
    for way in ("kept", "light", "whole"):
        paths = () if way == "kept" else block_paths(wide)
        stated = formulate(
            wide, mesh, within=restriction(name, 1), recompute=paths, lightly=way == "light", memory_limit=inf
        )
        answer = solve(replace(stated.problem, usages=(), usage_limit=None)).answer
        found = priced(wide, stated.strategy(answer), mesh)
        seconds[way], summed[way] = found.seconds, evaluate(stated.problem, answer).cost
        held[way] = sum(float(u.amounts[answer[u.node]]) for u in stated.problem.usages if u.start == 0 and u.stop == 1)
        if way == "light":
            first = next(n for n, e in enumerate(found.events) if e.phase == "backward")
            storages = [s for s in memory(found.program, mesh.device).storages if s.kind == ACTIVATIONS]
            assert held[way] == pytest.approx(sum(s.bytes for s in storages if s.born <= first <= s.dies), rel=0.02)
    assert held["whole"] < held["light"] < held["kept"]
    assert seconds["kept"] < seconds["light"] < seconds["whole"]
    assert seconds["light"] - seconds["kept"] == pytest.approx(summed["light"] - summed["kept"], rel=0.1)


class _Gated(torch.nn.Module):
    """Two products in one, whose halves are kept as views of both."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(64, 512), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.into(x).chunk(2, -1)
        return self.out(torch.nn.functional.silu(gate) * up).sum()


def test_a_view_keeps_all_that_it_lies_in() -> None:
    """Each half of a product counted as half of itself: a quarter of what is kept was missing."""
    graph = capture(_Gated(), (torch.randn(1024, 64),), {})
    mesh = mesh_of(parse_cluster("1xH100"))
    stated = formulate(graph, mesh, memory_limit=inf)
    answer = solve(replace(stated.problem, usages=(), usage_limit=None)).answer
    usages = [u for u in stated.problem.usages if (u.start, u.stop) == (0, 1)]
    found = priced(graph, stated.strategy(answer), mesh)
    first = next(n for n, e in enumerate(found.events) if e.phase == "backward")
    storages = [s for s in memory(found.program, mesh.device).storages if s.kind == ACTIVATIONS]
    kept = sum(s.bytes for s in storages if s.born <= first <= s.dies)
    assert sum(float(u.amounts[answer[u.node]]) for u in usages) == pytest.approx(kept, rel=0.01)
    least = stated.repriced(LEAST).problem
    sure = sum(float(u.amounts[answer[u.node]]) for u in least.usages if (u.start, u.stop) == (0, 1))
    assert sure == pytest.approx(kept - 1024 * 256 * 4, rel=0.01)  # a half may be brought into another layout by itself


@pytest.mark.parametrize("search", ["data-parallel", "zero-1", "fsdp"])
def test_what_is_surely_held_is_there_when_a_step_is_simulated(search: str) -> None:
    """Else a bound would refuse what fits: the update of a recorded step takes nothing beside the gradients."""
    resolved = resolve("gpt:small,width=2048", batch=8, seq=8)  # all parameters, hardly any activations
    graph, mesh = capture(resolved.model, resolved.args, resolved.kwargs), mesh_of(parse_cluster("8xH100"))
    stated = formulate(graph, mesh, within=restriction(search, 1), memory_limit=1e12)
    answer = solve(replace(stated.problem, usages=(), usage_limit=None)).answer
    needed = simulate(graph, stated.strategy(answer), mesh).peak_bytes
    for moment in (0, 1):
        held = [u for u in stated.repriced(LEAST).problem.usages if u.start <= moment < u.stop]
        assert held
        assert sum(float(u.amounts[answer[u.node]]) for u in held) <= needed
