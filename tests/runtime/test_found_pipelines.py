"""Pipelines that the joint search finds, run on four processes: the numbers of one process."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.pool import POOL
from runtime.workers import built
from shardwright.cluster import parse_cluster
from shardwright.planner import Options, plan_graph
from shardwright.planner.decided import decided
from shardwright.planner.joint import find_pipelines
from shardwright.plans import Plan, Stage
from shardwright.program.stages import StageGraph
from shardwright.runtime import parallelize
from shardwright.runtime.shards import whole
from shardwright.search.joint.ideals import Ideals
from shardwright.search.joint.orders import OTHERS
from shardwright.search.joint.pipelines import JointPlan
from shardwright.search.joint.timed import Run, Timed
from shardwright.verification.prepare import all_double
from shardwright.verification.recorded import loss_of


def compared(rank: int, reference: str, paths: list[str]) -> dict[str, float]:
    model, args, kwargs, graph = built(reference)
    with all_double(True):
        single = copy.deepcopy(model)
        loss = loss_of(single(*args, **kwargs))
        loss.backward()
    gradients = {name: p.grad for name, p in single.named_parameters()}
    worst = {}
    for path in paths:
        parallel = parallelize(copy.deepcopy(model), Plan.load(path), args, kwargs, graph=graph)
        result = loss_of(parallel(*args, **kwargs))
        result.backward()
        apart = (result - loss).abs().item()
        for name, parameter in parallel.named_parameters():
            if gradients[name] is not None:
                apart = max(apart, (whole(parameter.grad) - gradients[name]).abs().max().item())
        worst[path] = apart
    return worst


@pytest.mark.parametrize(
    ("reference", "cluster", "share"),
    [("llama:small,layers=4", "2x2xH100", 0.7)],
)
def test_found_pipelines_compute_the_numbers_of_one_process(
    reference: str, cluster: str, share: float | None, tmp_path: Path
) -> None:
    """With a share of the memory that the fastest needs, stages take several devices or recompute blocks."""
    graph = built(reference)[3]
    joint = find_pipelines(graph, parse_cluster(cluster), Options())
    plans = [joint.best, *(plan for plan in joint.recipes.values() if isinstance(plan, JointPlan))]
    if share is not None:
        plans += joint.under([share * max(stage.memory_bytes for stage in joint.best.stages)])
    several = next(plan for plan in plans if len(plan.stages) > 1)
    plans.append(
        replace(several, stages=tuple(replace(s, recomputed_blocks=0, lightly_blocks=1) for s in several.stages))
    )
    shapes = {str([(s.devices, s.recomputed_blocks, s.lightly_blocks) for s in p.stages]): p for p in plans}
    paths = []
    for number, plan in enumerate(plan for plan in shapes.values() if len(plan.stages) > 1):
        paths.append(str(tmp_path / f"{number}.json"))
        joint.deliver(plan).save(paths[-1])
    assert paths, list(shapes)
    for worst in POOL.run(compared, reference, paths, seconds=300):
        assert max(worst.values()) < 1e-10, (list(shapes), worst)


@pytest.mark.parametrize(
    "reference", ["alexnet:small,batch=8", "hf:t5:small", f"{Path(__file__).with_name('unet.py')}:build"]
)
def test_stages_between_ideals_compute_the_numbers_of_one_process(reference: str, tmp_path: Path) -> None:
    """Models without one run of blocks: the fastest pipeline of several stages, one of two stages on two devices each, and
    one whose devices are fewer at the end."""
    joint = find_pipelines(built(reference)[3], parse_cluster("2x2xH100"), Options(), names=("megatron-3d",))
    space = next(space for space in joint.space.spaces if isinstance(space.cutting, Ideals))
    plans = [joint.best, *joint.others.values()]
    cuts = space.cutting.even(2), space.cutting.even(3)
    for (*ends,), units in zip(cuts, ((2, 2), (2, 1, 1)), strict=True):
        runs = [Run(*two, own) for two, own in zip(itertools.pairwise(ends), units, strict=True)]
        several = [row for row in space.rows if row.units == 1 or row.price.name in ("auto", "data-parallel")]
        plans.append(Timed(space, several).plan(runs))
    paths = []
    for number, plan in enumerate(plan for plan in plans if plan is not None and len(plan.stages) > 1):
        paths.append(str(tmp_path / f"{number}.json"))
        joint.deliver(plan).save(paths[-1])
    assert len(paths) > 2
    for worst in POOL.run(compared, reference, paths, seconds=300):
        assert len(worst) == len(paths) and max(worst.values()) < 1e-10, worst


def test_other_orders_of_passes_compute_the_numbers_of_one_process(tmp_path: Path) -> None:
    """Split backward passes, and two stages on each of two groups of two devices."""
    reference = "llama:small,layers=4"
    joint = find_pipelines(built(reference)[3], parse_cluster("2x2xH100"), Options(), names=())
    space = joint.space.spaces[0]
    two = Timed(space, space.rows).plan([Run(0, 2, 2), Run(2, 4, 2)])
    assert two is not None
    paths = []
    for name in OTHERS:
        found = joint.space.same_in(name, two)
        assert found is not None
        plan = joint.deliver(found)
        paths.append(str(tmp_path / f"{name}.json"))
        plan.save(paths[-1])
    for worst in POOL.run(compared, reference, paths, seconds=300):
        assert len(worst) == len(OTHERS) and max(worst.values()) < 1e-10, worst


def test_rows_dealt_out_between_unlike_devices_compute_the_numbers_of_one_process(tmp_path: Path) -> None:
    """One mesh of two kinds of devices, the faster with more rows of the batch."""
    reference, cluster = "gpt:small,batch=16", parse_cluster("2xA100+2xH100")
    graph = built(reference)[3]
    options = Options(search="data-parallel", baselines=(), fewer_devices=False, one_axis=False)
    equal = plan_graph(graph, cluster, options)
    shared = replace(equal.stages[0].strategy, shares={"node": (0.25, 0.75)})
    written = decided({1: StageGraph(graph, {}, {}, ())}, shared, equal.meshes[0])
    plan = replace(equal, stages=(Stage.of(graph, shared, written),))
    path = str(tmp_path / "dealt.json")
    plan.save(path)
    for worst in POOL.run(compared, reference, [path], seconds=300):
        assert max(worst.values()) < 1e-10, worst


def test_stages_across_unlike_devices_compute_the_numbers_of_one_process(tmp_path: Path) -> None:
    """One stage on all of them, and one in the middle of a pipeline; each deals the rows of a micro-batch out by speed."""
    reference = "gpt:small,layers=4,batch=24"
    joint = find_pipelines(built(reference)[3], parse_cluster("2xV100+2xH100"), Options(), names=())
    space = next(space for space in joint.space.spaces if space.size == 6)
    across = [row for row in space.rows if row.price.strategy.shares]
    alone = [row for row in space.rows if not row.price.strategy.shares]
    shapes = [[Run(0, 4, 4)], [Run(0, 1, 1), Run(1, 3, 2), Run(3, 4, 1)]]
    paths = []
    for number, runs in enumerate(shapes):
        found = Timed(space, across if number == 0 else [*across, *alone]).plan(runs)
        assert found is not None and any(stage.strategy.shares for stage in found.stages)
        plan = joint.deliver(found)
        assert [bool(s.strategy.shares) for s in plan.stages] == [bool(s.strategy.shares) for s in found.stages]
        paths.append(str(tmp_path / f"{number}.json"))
        plan.save(paths[-1])
    for worst in POOL.run(compared, reference, paths, seconds=300):
        assert len(worst) == len(shapes) and max(worst.values()) < 1e-10, worst
