"""Ranks so slow that no shares of the plan make up for it: another plan, and back again."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from runtime.assistant.test_moving import Subject, step
from runtime.pool import PAIR
from runtime.workers import built
from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.planner import Options, plan_graph
from shardwright.plans import Plan
from shardwright.runtime import parallelize
from shardwright.runtime.assistant import assist, clocks, links, other_plans
from shardwright.runtime.assistant import assistant as acting
from shardwright.verification.prepare import all_double
from shardwright.zoo.reference import resolve


def gpt() -> Subject:
    return built("gpt:small,layers=1,heads=8,batch=8")


def planned(graph: Graph, search: str) -> Plan:
    options = Options(search=search, baselines=(), fewer_devices=False, max_axes=1)
    return plan_graph(graph, parse_cluster("2xH100"), options)


def cuts_batch(strategy: Strategy) -> bool:
    """Rather than parameters."""
    return not any(isinstance(layout[0], Shard) for layout in strategy.resting.values())


def gone_over(rank: int, uncut: float) -> tuple[float, list[str], list[bool]]:
    """Rank 1 becomes three times slower. A rank does its heads and, however few they are, ``uncut`` more; of rows it has as
    many as it is given. Once another plan runs it is fast again. Time is the test's own, and so is what plans come to."""
    now, slow = [0.0], [1.0, 1.0]
    clocks.perf_counter = acting.perf_counter = links.perf_counter = other_plans.perf_counter = lambda: now[0]
    by_price, recipes, subject = other_plans.seconds_at, other_plans.RECIPES, gpt()
    other_plans.RECIPES = ("data-parallel", "megatron")

    def work(strategy: Strategy, place: int) -> float:
        share = strategy.shares.get(strategy.axes[0][0], (0.5, 0.5))[place]
        return 1.9 * share if cuts_batch(strategy) else share + uncut

    other_plans.seconds_at = lambda plan, graph, slowness: max(
        own * work(plan.stages[0].strategy, place) for place, own in enumerate(slowness)
    )
    tensor_parallel = planned(subject[3], "megatron")
    model, args, kwargs, graph = subject
    with all_double():
        parallel = parallelize(model, tensor_parallel, args, kwargs, graph=graph, keep=True)
    optimizer, alone = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9), copy.deepcopy(model)
    single, assistant = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9), assist(parallel, optimizer)

    def pass_time(*_: Any) -> None:
        now[0] += slow[rank] * work(parallel.program.strategy, rank)

    hook = parallel.register_forward_pre_hook(pass_time)
    far, seen = 0.0, [cuts_batch(parallel.program.strategy)]
    for number in range(90):
        slow[1] = 3.0 if number >= 12 and len(seen) == 1 else 1.0
        far = max(far, abs(step(parallel, optimizer, subject) - step(alone, single, subject)))
        if cuts_batch(parallel.program.strategy) != seen[-1]:
            seen.append(not seen[-1])
            if len(seen) == 3:
                break
    hook.remove()
    assistant.leave()
    clocks.perf_counter = acting.perf_counter = links.perf_counter = other_plans.perf_counter = time.perf_counter
    other_plans.seconds_at, other_plans.RECIPES = by_price, recipes
    return far, [str(event) for event in assistant.events], seen


@pytest.mark.parametrize(("uncut", "leaves"), [(0.4, True), (0.0, False)], ids=["much is uncut", "all is cut"])
def test_a_slow_rank_is_answered_by_another_plan_where_shares_do_not_suffice(uncut: float, leaves: bool) -> None:
    answers = PAIR.run(gone_over, uncut, seconds=200)
    assert all(far < 1e-9 and seen == answers[0][2] for far, _, seen in answers)
    over = [text for text in answers[0][1] if "went over to another plan" in text]
    assert answers[0][2] == ([False, True, False] if leaves else [False])
    if leaves:
        assert len(over) == 2 and over[0].startswith("rank 1 is")
        assert "× slower since step" in over[0] and over[1].startswith("rank 1 is as fast as the others since step")
    assert any("moved" in text for text in answers[0][1])  # shares first


def test_a_plan_is_dealt_out_by_speed_and_as_slow_as_its_last_rank() -> None:
    resolved = resolve("gpt:layers=1,width=1024,heads=16,vocab=512,seq=512", batch=64, device="meta")
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    for search in ("data-parallel", "megatron"):
        plan = planned(graph, search)
        assert other_plans.by_speed(plan, graph, [1.0, 1.0]).stages[0].strategy.shares == {}
        given = other_plans.by_speed(plan, graph, [1.0, 3.0])
        ((_, shares),) = given.stages[0].strategy.shares.items()
        assert sum(shares) == pytest.approx(1.0) and 0.25 >= shares[1] > 0
        ranks = ([1.0, 1.0], [1.0, 3.0], [3.0, 1.0])
        equal, slow, mirrored = (other_plans.seconds_at(plan, graph, speeds) for speeds in ranks)
        assert equal < other_plans.seconds_at(given, graph, [1.0, 3.0]) < slow
        assert slow == pytest.approx(mirrored, rel=0.05)
