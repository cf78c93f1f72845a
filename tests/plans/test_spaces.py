"""What a bound speaks of is decided from data: which plans a space contains, and in which words it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, Pipelining, plan_graph, plan_pipeline
from shardwright.planner.proving import checked
from shardwright.plans import Bound, Plan, Proof, SearchSpace, Stage
from shardwright.plans.plan import PlanRequest
from shardwright.plans.proof import STEP, SUM
from shardwright.plans.proof_text import proof_document, proof_text, spaces_text, warnings_text
from shardwright.plans.spaces import (
    LIGHT,
    NOTHING,
    PIPELINE,
    SOME,
    WHOLE,
    blocks_alike,
    recomputed_of,
    stages_fingerprint,
)
from shardwright.zoo.reference import resolve

MESH = (("gpu", 2),)
FLAT = SearchSpace(meshes=(MESH,), alike=False)


@pytest.fixture(scope="module")
def graph() -> Graph:
    built = resolve("gpt:layers=3,width=64,heads=2,vocab=64,seq=16", batch=4)
    return capture(built.model, built.args, built.kwargs)


@pytest.fixture(scope="module")
def flat(graph: Graph) -> Plan:
    return plan_graph(graph, parse_cluster("2xH100"), Options("fsdp", baselines=(), recompute="none"))


@pytest.fixture(scope="module")
def staged(graph: Graph) -> Plan:
    return plan_pipeline(graph, parse_cluster("2xH100"), Pipelining(2, 2, "1f1b"), Options(baselines=()))


def with_strategy(plan: Plan, **changes: object) -> Plan:
    stage = plan.stages[0]
    return replace(plan, stages=(replace(stage, strategy=replace(stage.strategy, **changes)),))  # type: ignore[arg-type]


def test_every_field_of_a_space_keeps_plans_out(flat: Plan, staged: Plan) -> None:
    """One plan that is in, and per field a space that it is not in."""
    assert FLAT.contains(flat) and replace(FLAT, meshes=()).contains(flat)
    assert replace(FLAT, search="fsdp", memory_limit=flat.prediction.memory_bytes).contains(flat)
    narrower = (
        {"search": "megatron"},
        {"search": PIPELINE},
        {"meshes": ((("gpu", 4),),)},
        {"meshes": ((("node", 2),),)},
        {"recompute": (LIGHT, WHOLE)},
        {"pins": ("*.weight=S0",)},
        {"forbidden": ("head@gpu",)},
        {"memory_limit": 0.999 * flat.prediction.memory_bytes},
        {"training": False},
        {"microbatches": (2, 4)},
        {"given_stages": stages_fingerprint(staged.stages)},
    )
    for changes in narrower:
        assert not replace(FLAT, **changes).contains(flat), changes  # type: ignore[arg-type]
    pinned = replace(flat, asked=PlanRequest(None, ("*.weight=S0", "wte=R"), ("head@gpu",)))
    assert replace(FLAT, pins=("*.weight=S0",), forbidden=("head@gpu",)).contains(pinned)


def test_stages_and_micro_batches_are_in_their_own_spaces(flat: Plan, staged: Plan) -> None:
    (bound,) = staged.proof.bounds
    assert bound.space.contains(staged) and not bound.space.contains(flat)
    assert not FLAT.contains(staged) and not replace(FLAT, most_stages=2).contains(staged)
    turned = (
        replace(staged.stages[0], ranks=staged.stages[1].ranks),
        replace(staged.stages[1], ranks=staged.stages[0].ranks),
    )
    assert not bound.space.contains(replace(staged, stages=turned))
    joint = SearchSpace(search=PIPELINE, microbatches=(2,), most_stages=4, summed=True)
    assert not joint.contains(staged) and joint.contains(replace(staged, search=PIPELINE))
    assert not replace(joint, most_stages=1).contains(replace(staged, search=PIPELINE))
    assert not replace(joint, microbatches=(4,)).contains(replace(staged, search=PIPELINE))


def test_how_much_is_recomputed_is_read_off_the_graph(graph: Graph, flat: Plan) -> None:
    paths = ("blocks.0", "blocks.1", "blocks.2")
    ways = {
        NOTHING: {},
        WHOLE: {"recomputed": paths},
        LIGHT: {"recomputed": paths, "lightly": frozenset(paths)},
        SOME: {"recomputed": paths[:2]},
    }
    for way, changes in ways.items():
        plan = with_strategy(flat, **changes)
        assert recomputed_of(graph, plan.stages[0].strategy) == way
        assert [w for w in ways if replace(FLAT, recompute=(w,)).contains(plan)] == [way]
    mixed = with_strategy(flat, recomputed=paths, lightly=frozenset(paths[:1]))
    assert recomputed_of(graph, mixed.stages[0].strategy) == SOME


def test_equal_blocks_that_are_split_unlike_are_out_where_they_are_to_be_alike(graph: Graph, flat: Plan) -> None:
    alike = replace(FLAT, alike=True)
    assert alike.contains(flat) and blocks_alike(graph, flat.stages[0].strategy)
    strategy = flat.stages[0].strategy
    name = next(op.name for op in graph.ops if op.module.startswith("blocks.2") and strategy.splits[op.name] != (None,))
    other = with_strategy(flat, splits={**strategy.splits, name: (None,)})
    assert FLAT.contains(other) and not alike.contains(other)
    weight = next(p.tensor for p in graph.parameters if p.paths[0].startswith("blocks.1") and "weight" in p.paths[0])
    changed = tuple(reversed(strategy.resting[weight])) if len(set(strategy.resting[weight])) > 1 else None
    resting = {**strategy.resting, weight: changed or strategy.resting[graph.parameters[0].tensor][:0]}
    assert not alike.contains(with_strategy(flat, resting=resting))
    assert not alike.contains(replace(flat, captured=None)) and not alike.contains(replace(other, captured=None))


def test_unequal_shares_are_in_where_the_faster_devices_have_no_fewer() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    cluster = parse_cluster("1xA100+1xH100")
    with torch.device("meta"):
        graph = capture(Small(), (torch.empty(8, 8),))
    found = plan_graph(graph, cluster, Options("data-parallel", baselines=(), recompute="none"))
    axes = found.stages[0].strategy.axes
    assert axes == mesh_of(cluster).names == (("node", 2),)
    equal, dealt = SearchSpace(meshes=(axes,)), SearchSpace(meshes=(axes,), faster_share="H100")
    slow, fast = (with_strategy(found, shares={"node": shares}) for shares in ((0.75, 0.25), (0.25, 0.75)))
    assert [equal.contains(plan) for plan in (found, slow, fast)] == [True, False, False]
    assert [dealt.contains(plan) for plan in (found, slow, fast)] == [True, False, True]


def test_a_bound_speaks_of_the_plans_of_its_space_alone(flat: Plan) -> None:
    """Above a plan that is inside it is dropped, with who showed it; above others it stays; on sums it falls silent."""
    p = flat.prediction
    inside = Bound(FLAT, STEP, 2 * p.step_seconds)
    outside = replace(inside, space=replace(FLAT, search="megatron"))
    below = Bound(FLAT, SUM, 0.7 * p.sum_seconds)
    left = checked(Proof((inside, outside, below)), flat, "fsdp")
    assert left.bounds == (replace(inside, value=0.0), outside, below)
    [dropped] = left.dropped
    assert (dropped.bound, dropped.name, dropped.shape, dropped.seconds) == (inside, "fsdp", MESH, p.step_seconds)
    assert left.step_bound == 0.0 and left.sum_bound == below.value
    assert proof_text(replace(flat, proof=left)).count("no bound on the step") == 1
    assert len(warnings_text(replace(flat, proof=left))) == 1
    summed = replace(inside, space=replace(FLAT, summed=True))
    silent = checked(Proof((summed,)), flat, "fsdp")
    assert silent.bounds[0].value == 0.0 and not silent.dropped


def test_what_is_proved_of_two_spaces_is_the_lesser_and_one_without_a_bound_leaves_none() -> None:
    other = replace(FLAT, meshes=((("gpu", 1),),))
    one, two = Bound(FLAT, STEP, 3.0), Bound(other, STEP, 2.0)
    proof = Proof((one,), seconds=1.0).beside(Proof((two,), seconds=2.0))
    assert (proof.step_bound, proof.seconds) == (2.0, 3.0)
    assert proof.silent(one).step_bound == 0.0
    assert proof.beside(proof).bounds == proof.bounds
    assert proof.sum_bound == 0.0 and not proof.optimal and Proof().step_bound == 0.0


def test_words_are_made_of_data_last(flat: Plan) -> None:
    joint = SearchSpace(search=PIPELINE, microbatches=(4, 16), cuts=("blocks",), orders=("1f1b",), summed=True)
    both = Proof((Bound(FLAT, STEP, 1.0), Bound(FLAT, SUM, 1.0), Bound(joint, STEP, 2.0)))
    said = spaces_text(both)
    assert said.count("the step also over pipelines of 4 or 16 micro-batches: contiguous runs of blocks") == 1
    assert said.endswith("; not among them: other meshes, unequal shares, ring attention")
    alone = spaces_text(Proof((Bound(FLAT, STEP, 1.0),)))
    assert alone.endswith("; not among them: other meshes, unequal shares, pipelines, ring attention")
    dealt = Bound(replace(FLAT, faster_share="H100"), STEP, 1.0)
    assert "unequal shares, pipelines" not in spaces_text(Proof((Bound(FLAT, STEP, 1.0), dealt)))
    plan = replace(flat, proof=replace(both, bounds=both.bounds[:2], cost=1.5))
    assert "at most 50.00 % above the optimum" in proof_text(plan)
    document = proof_document(plan)
    assert document["bounds"][0]["space"]["meshes"] == (MESH,) and document["text"] == proof_text(plan)
    assert (document["gap"], document["optimal"]) == (0.5, False)
    empty = replace(flat, proof=Proof())
    assert proof_text(empty) == "Nothing is proved."
    given = Stage.of(flat.graph(), flat.stages[0].strategy)
    fixed = SearchSpace(given_stages=stages_fingerprint([given]), microbatches=(8,))
    assert spaces_text(Proof((Bound(fixed, STEP, 1.0),))) == "orders of the passes of this stage and 8 micro-batches"
