"""Pipelines of priced blocks against every composition on a small model, and never worse than the baselines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shardwright.cluster import parse_cluster
from shardwright.errors import Infeasible, ProblemError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.schedules import gpipe, known_schedule, one_f_one_b, pipeline, run
from shardwright.search.conditions import Conditions
from shardwright.search.joint._kernels import last_backwards
from shardwright.search.joint.blocks import BlockPricer
from shardwright.search.joint.orders import OTHERS, least_held, order_of, stages_per_group
from shardwright.search.joint.pipelines import BASELINES, JointPlan, Model, Pipelines, search_pipelines
from shardwright.search.joint.space import Space
from shardwright.search.joint.timed import Run, Timed
from shardwright.zoo.reference import resolve


def small(size: int) -> Graph:
    resolved = resolve("gpt:layers=4,width=256,heads=4,vocab=512,seq=128", batch=size)
    return capture(resolved.model, resolved.args, resolved.kwargs)


GRAPHS: dict[int, Graph] = {}


def graph_at(size: int) -> Graph:
    return GRAPHS.setdefault(size, small(size)) if size not in GRAPHS else GRAPHS[size]


def every_step(space: Space, order: str = "1f1b") -> Iterator[float]:
    """Every way to give runs of blocks to aligned powers of two of devices and to run each of these stages."""
    timed, last = Timed(space, space.rows, order), space.cuts - 1
    for stages in range(1, space.most + 1):
        for inner in itertools.combinations(range(1, last), stages - 1):
            cuts = [0, *inner, last]
            for units in itertools.product([1, 2, 4], repeat=stages):
                ways = timed.stages(
                    [Run(*ends, own) for ends, own in zip(itertools.pairwise(cuts), units, strict=True)]
                )
                yield from map(timed.step, itertools.product(*ways) if ways else ())


@pytest.mark.parametrize(
    ("where", "size", "limit"),
    [
        ("4xH100", 4, None),
        ("4xH100", 4, 40e6),
        ("4xH100", 4, 30e6),
        ("2x2xH100", 2, None),
        ("2x2xH100", 2, 28e6),
        ("2xA100-80GB+2xH100", 4, None),
        ("2xA100-80GB+2xH100", 2, None),
        ("2xA100-80GB+2xH100", 2, 30e6),
        ("2xH100+2xV100", 2, None),
        ("2xH100+2xV100", 4, 40e6),
    ],
)
def test_the_bound_is_below_every_pipeline_and_the_answer_is_the_best(
    where: str, size: int, limit: float | None
) -> None:
    cluster = parse_cluster(where)
    space = Space(Model(graph_at), cluster, 16, size, Conditions(memory_limit=limit), 2, 64)
    steps = {order: min(every_step(space, order), default=np.inf) for order in ("1f1b", "gpipe", *OTHERS)}
    fastest, free = min(steps.values()), space.bound()
    assert free <= fastest * (1 + 1e-9)
    for known in (fastest, 1.2 * fastest):  # what is known leaves more out, and nothing that is faster
        assert free * (1 - 1e-9) <= space.bound(known) <= fastest * (1 + 1e-9)
    assert all(steps[order] <= space.even(order) for order in steps if order != "gpipe")
    best = space.improved(space.composed(known=space.even()))
    assert best is not None
    for order, found in (("1f1b", best), *((order, space.ordered(order, [best])) for order in OTHERS)):
        assert (found is None) == np.isinf(steps[order])
        if found is None:
            continue
        assert found.schedule == order
        assert found.step_seconds == pytest.approx(steps[order], rel=1e-9)
        room = limit or cluster.device.usable_memory
        assert all(stage.memory_bytes <= room * (1 + 1e-9) for stage in found.stages)
        assert [s.first_block for s in found.stages[1:]] == [s.last_block for s in found.stages[:-1]]
        assert (found.stages[0].first_block, found.stages[-1].last_block) == (0, 4)
        devices = [stage.first_device for stage in found.stages]
        assert devices == sorted(devices) or order in ("interleaved-1f1b", "zb-v")


@pytest.mark.parametrize("order", ["1f1b", "gpipe", *OTHERS])
def test_a_group_holds_at_least_what_the_bound_takes_it_to(order: str) -> None:
    """Forward passes that are not through, of two stages half of them, whatever the number of groups before it."""
    each = stages_per_group(order)
    for groups, microbatches in itertools.product(range(2, 9), range(1, 20)):
        schedule = known_schedule(order, each * groups, microbatches, groups)
        least = least_held(order if each > 1 else "1f1b", 8, microbatches)
        for device in range(groups):
            assert schedule.in_flight(device) // each >= least[groups - 1 - device]
        if order == "interleaved-1f1b":  # its last pass is one of its first stage: those before it drain after it
            assert all(actions[-1].stage == device for device, actions in enumerate(schedule.orders))


@pytest.mark.parametrize("order", OTHERS)
def test_an_order_is_timed_as_its_schedule_runs(order: str) -> None:
    seconds = [0.3, 0.9, 0.5, 0.7, 0.4, 0.6][: 3 * stages_per_group(order)]
    schedule = known_schedule(order, len(seconds), 5, 3)
    thirds = [one / 3 for one in seconds]
    work = pipeline(schedule.device_of, 5, forward=thirds, inputs=thirds, weights=thirds)
    made = order_of(order, 3, 5)
    assert made.ends(seconds) == pytest.approx([end[-1] for end in run(schedule, work).ends], rel=1e-12)
    assert made.in_flight == tuple(schedule.in_flight(device) for device in range(3))


@pytest.mark.parametrize("order", OTHERS)
def test_the_same_pipeline_in_another_order(order: str) -> None:
    """Two stages per group: half of a group's blocks each, on the same devices, split as before."""
    space = Pipelines(Model(graph_at), parse_cluster("2xH100"), batch=16, microbatch_sizes=(2,))
    plain = Timed(space.spaces[0], space.spaces[0].rows).plan([Run(0, 2, 1), Run(2, 4, 1)])
    assert plain is not None
    found = space.same_in(order, plain)
    assert found is not None and found.schedule == order
    assert found.step_seconds < plain.step_seconds
    devices = {"interleaved-1f1b": [0, 1, 0, 1], "zb-v": [0, 1, 1, 0]}.get(order, [0, 1])
    assert [stage.first_device for stage in found.stages] == devices
    assert {id(stage.strategy) for stage in found.stages} <= {id(stage.strategy) for stage in plain.stages}
    assert [s.last_block - s.first_block for s in found.stages] == [4 // len(devices)] * len(devices)


def test_a_step_is_that_of_the_schedule_event_by_event() -> None:
    seconds = np.array([0.3, 0.9, 0.5, 0.7])
    work = pipeline(range(4), 6, forward=list(seconds / 3), inputs=list(2 * seconds / 3), weights=0.0)
    for make, warm in ((one_f_one_b, np.array([4, 3, 2, 1])), (gpipe, np.full(4, 6))):
        ends = [end[-1] for end in run(make(4, 6), work).ends]
        assert last_backwards(seconds, 6, warm) == pytest.approx(ends, rel=1e-12)


def test_no_worse_than_any_baseline_and_bounded() -> None:
    best, others = search_pipelines(
        Model(graph_at, blocks=8), parse_cluster("2x2xH100"), batch=16, microbatch_sizes=(2, 4), baselines=BASELINES
    )
    assert best.stages[-1].last_block == 8
    assert best.bound_seconds <= best.step_seconds
    assert set(others) == set(BASELINES)
    for plan in others.values():
        if isinstance(plan, JointPlan):
            assert best.step_seconds <= plan.step_seconds


def test_stages_across_unlike_nodes_deal_rows_out_by_speed() -> None:
    space = Space(Model(graph_at, blocks=8), parse_cluster("2xH100+2xV100"), 32, 8, Conditions(), 2, 64)
    across = [row for row in space.rows if row.price.strategy.shares]
    assert {(row.units, row.low, row.high) for row in across} == {(2, 1, 3), (4, 0, 4)}
    for row in across:
        price, (fast, slow) = row.price, row.price.strategy.shares["node"]
        assert fast > slow and fast * 8 == round(fast * 8)
        assert price.mesh.kinds and price.mesh.axes[0].shares == (fast, slow)
        recipe = price.name.removesuffix(" in shares")
        alike = space.pricer.alike(price.mesh.with_shares({"": ()}), price.mesh.kinds, 4, recipe)
        assert alike is not None
        own = [alike[kind] for kind in price.mesh.kinds]
        parts = [
            one.traffic.block + 2 * share * (one.seconds.block - one.traffic.block)
            for one, share in zip(own, (fast, slow), strict=True)
        ]
        assert price.seconds.block == pytest.approx(max(parts))
        assert price.seconds.block < max(one.seconds.block for one in own)  # of equal parts the slower kind decides
        assert price.held.block == pytest.approx(max(2 * fast * own[0].held.block, 2 * slow * own[1].held.block))
    timed = Timed(space, space.rows)
    middle = timed.plan([Run(0, 2, 1), Run(2, 6, 2), Run(6, 8, 1)])
    assert middle is not None
    assert [(stage.first_device, stage.devices) for stage in middle.stages] == [(0, 1), (1, 2), (3, 1)]
    assert [bool(stage.strategy.shares) for stage in middle.stages] == [False, True, False]


def test_other_stages_do_not_stand_across_unlike_nodes() -> None:
    both = parse_cluster("2xH100+2xA100-80GB")
    best, _ = search_pipelines(Model(graph_at, blocks=8), both, batch=16, microbatch_sizes=(4,))
    for stage in (stage for stage in best.stages if not stage.strategy.shares):
        devices = range(stage.first_device, stage.first_device + stage.devices)
        assert len({number // 2 for number in devices}) == 1


def test_prices_add_up_to_the_problem_they_come_from() -> None:
    pricer = BlockPricer(graph_at(4))
    from shardwright.cluster import meshes

    price = pricer.prices(meshes(parse_cluster("2xH100"), 1)[0], 4)[0]
    assert price.seconds.block > 0 and price.held.block > 0 and price.resting.block > 0
    assert 0 < price.lightly.seconds < price.wholly.seconds
    assert 0 < price.lightly.saves < price.wholly.saves < price.held.block
    assert pricer.boundary_bytes == 4 * 128 * 256 * 4


def test_what_cannot_be_said_is_refused() -> None:
    with pytest.raises(ProblemError, match="do not divide"):
        search_pipelines(Model(graph_at), parse_cluster("2xH100"), batch=6, microbatch_sizes=(4,))
    with pytest.raises(Infeasible, match="fits"):
        tight = Conditions(memory_limit=1e5)
        search_pipelines(Model(graph_at), parse_cluster("2xH100"), batch=8, microbatch_sizes=(4,), conditions=tight)
    linear = torch.nn.Linear(4, 4)
    with pytest.raises(ProblemError, match="no repeated blocks"):
        BlockPricer(capture(linear, (torch.zeros(2, 4),), {}))
