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
from shardwright.schedules import gpipe, one_f_one_b, pipeline, run
from shardwright.search.joint._kernels import last_backwards
from shardwright.search.joint.blocks import BlockPricer
from shardwright.search.joint.pipelines import BASELINES, JointPlan, Model, search_pipelines
from shardwright.search.joint.space import Space
from shardwright.search.joint.timed import Run, Timed
from shardwright.zoo.reference import resolve


def small(size: int) -> Graph:
    resolved = resolve("gpt:layers=4,width=256,heads=4,vocab=512,seq=128", batch=size)
    return capture(resolved.model, resolved.args, resolved.kwargs)


GRAPHS: dict[int, Graph] = {}


def graph_at(size: int) -> Graph:
    return GRAPHS.setdefault(size, small(size)) if size not in GRAPHS else GRAPHS[size]


def every_step(space: Space) -> Iterator[float]:
    """Every way to give runs of blocks to aligned powers of two of devices and to run each of these stages."""
    timed, last = Timed(space, space.rows), space.cuts - 1
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
    space = Space(Model(graph_at), cluster, 16, size, limit, "adamw", 2, 64)
    fastest = min(every_step(space))
    assert space.bound() <= fastest * (1 + 1e-9)
    found = space.best()
    assert found is not None
    assert found.step_seconds <= fastest * (1 + 1e-9)
    room = limit or cluster.device.usable_memory
    assert all(stage.memory_bytes <= room * (1 + 1e-9) for stage in found.stages)
    assert [s.first_block for s in found.stages[1:]] == [s.last_block for s in found.stages[:-1]]


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


def test_stages_do_not_stand_across_unlike_nodes() -> None:
    both = parse_cluster("2xH100+2xA100-80GB")
    best, _ = search_pipelines(Model(graph_at, blocks=8), both, batch=16, microbatch_sizes=(4,))
    for stage in best.stages:
        devices = range(stage.first_device, stage.first_device + stage.devices)
        assert len({number // 2 for number in devices}) == 1


def test_prices_add_up_to_the_problem_they_come_from() -> None:
    pricer = BlockPricer(graph_at(4))
    from shardwright.cluster import meshes

    price = pricer.prices(meshes(parse_cluster("2xH100"), 1)[0], 4)[0]
    assert price.seconds.block > 0 and price.held.block > 0 and price.resting.block > 0
    assert price.recompute_seconds > 0 and price.recompute_saves > 0
    assert price.recompute_saves < price.held.block
    assert pricer.boundary_bytes == 4 * 128 * 256 * 4


def test_what_cannot_be_said_is_refused() -> None:
    with pytest.raises(ProblemError, match="do not divide"):
        search_pipelines(Model(graph_at), parse_cluster("2xH100"), batch=6, microbatch_sizes=(4,))
    with pytest.raises(Infeasible, match="fits"):
        search_pipelines(Model(graph_at), parse_cluster("2xH100"), batch=8, microbatch_sizes=(4,), memory_limit=1e5)
    linear = torch.nn.Linear(4, 4)
    with pytest.raises(ProblemError, match="no repeated blocks"):
        BlockPricer(capture(linear, (torch.zeros(2, 4),), {}))
