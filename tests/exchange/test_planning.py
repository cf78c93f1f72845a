"""Configurations become plans that are recognised as them; what an engine can express comes back as the same plan."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard

from shardwright.cluster import parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.exchange import Configuration, ConfigurationError, read_configuration
from shardwright.exchange.changing import check_kept, improve, judge, judged_changes, single_changes
from shardwright.exchange.expressing import ENGINES, canonical, nearest
from shardwright.exchange.planning import Followed, mesh_and_roles, plan_like, rows_asked
from shardwright.exchange.recognising import recognise
from shardwright.exchange.writing import parse, written
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options
from shardwright.plans import Plan
from shardwright.zoo.reference import resolve

FILES = Path(__file__).parents[1] / "data" / "exchange"
LLAMA = "llama:layers=4,width=64,heads=8,kv_heads=4,inner=128,vocab=256,batch=16,seq=16"


@cache
def graph(model: str = LLAMA) -> Graph:
    found = resolve(model)
    return capture(found.model, found.args, found.kwargs)


def on(cluster: str, **decisions: Any) -> tuple[str, Configuration]:
    return cluster, Configuration("plan", optimizer="adamw", **decisions)


RECIPES = {
    "data parallelism": on("4xH100", replicate=4),
    "fsdp": on("4xH100", shard=4),
    "fsdp on two nodes": on("2x4xH100", shard=8),
    "zero-2": on("4xH100", shard=4, sharding="gradients", reshard=False),
    "zero-1": on("4xH100", shard=4, sharding="optimizer", reshard=False),
    "hybrid shard": on("2x4xH100", replicate=2, shard=4),
    "accumulated": on("4xH100", shard=4, microbatches=2),
    "tensor": on("4xH100", tensor=4),
    "tensor and sequence": on("4xH100", tensor=4, sequence=True),
    "tensor and fsdp": on("8xH100", shard=4, tensor=2, sequence=True),
    "context": on("4xH100", context=4),
    "context and fsdp": on("4xH100", shard=2, context=2),
    "1f1b": on("4xH100", pipeline=4, microbatches=8),
    "1f1b and fsdp": on("4xH100", pipeline=2, shard=2, microbatches=4),
    "interleaved": on("2xH100", pipeline=2, stages_per_device=2, schedule="interleaved-1f1b", microbatches=4),
    "zero bubble": on("2xH100", pipeline=2, schedule="zb-h1", microbatches=4),
    "three degrees": on("8xH100", pipeline=2, shard=2, tensor=2, sequence=True, microbatches=4),
    "whole recomputation": on("4xH100", shard=4, recompute="blocks"),
    "light recomputation": on("4xH100", shard=4, recompute="light"),
    "half recomputed": on("4xH100", shard=4, recompute="blocks", recomputed_share=0.5),
    "three degrees, half recomputed": on(
        "8xH100", pipeline=2, replicate=2, tensor=2, microbatches=4, recompute="blocks", recomputed_share=0.5
    ),
}  # fmt: skip


@cache
def followed(cluster: str, c: Configuration) -> Followed:
    return plan_like(graph(), parse_cluster(cluster), c)


def decided(plan: Plan) -> list[Any]:
    """Everything that a plan decides about who does what."""
    return [
        plan.schedule.orders,
        [(s.operators, s.ranks, s.strategy.axes, s.strategy.splits, s.strategy.resting) for s in plan.stages],
        [(s.strategy.regathered, s.strategy.whole_gradients, s.strategy.recomputed) for s in plan.stages],
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_a_configuration_is_recognised_in_its_plan(name):
    found = followed(*RECIPES[name])
    back = recognise(found.plan, graph())
    said = canonical(back.configuration).difference(canonical(found.configuration))
    assert not said.keys() - {"length", "modules", "cuts"}
    assert back.lost == () and found.remarks == ()
    assert found.plan.prediction.step_seconds > 0


@pytest.mark.parametrize("name", RECIPES)
def test_what_an_engine_can_express_comes_back_as_the_same_plan(name):
    """read(write(plan)) is the plan: for every engine that loses nothing of the recipe."""
    cluster, c = RECIPES[name]
    plan = followed(cluster, c).plan
    recognised = recognise(plan, graph()).configuration
    expressed = 0
    for engine in ENGINES:
        try:
            found = nearest(recognised, engine)
        except ConfigurationError:
            continue
        # Engines that are told no modules cut as many blocks into every stage, which is what was cut here.
        if {remark.key for remark in found.lost} - {"cuts"}:
            continue
        read = parse(written(found), engine)
        said = {remark.key: getattr(found.configuration, remark.key) for remark in found.unsaid}
        again = followed(cluster, replace(read.on(plan.devices, 16), **said, optimizer="adamw"))
        assert decided(again.plan) == decided(plan), engine
        assert again.plan.prediction == plan.prediction
        expressed += 1
    assert expressed >= 1


def test_degrees_lie_on_the_links_that_their_order_gives_them():
    c = Configuration("plan", replicate=2, shard=4, tensor=4)
    mesh, roles = mesh_and_roles(parse_cluster("4x8xH100"), c)
    assert list(zip([axis.name for axis in mesh.axes], mesh.sizes, roles, strict=True)) == [
        ("outer_node", 2, "replicate"), ("inner_node", 2, "shard"), ("outer", 2, "shard"), ("inner", 4, "tensor"),
    ]  # fmt: skip


def test_weights_lie_as_a_tp_plan_says():
    modules = (("attention.query", "columns"), ("attention.output", "rows"), ("feed.up", "columns"))
    c = Configuration("hf", tensor=4, modules=modules)
    strategy = followed("4xH100", c).plan.stages[0].strategy
    by_path = {p.paths[0]: strategy.resting[p.tensor][0] for p in graph().parameters}
    for path, layout in by_path.items():
        module = path.rpartition(".")[0]
        told = next((way for name, way in modules if module.endswith(name)), "whole")
        assert layout == {"columns": Shard(0), "rows": Shard(1), "whole": Replicate()}[told], path
    with pytest.raises(ConfigurationError, match="No module of the model is called"):
        followed("4xH100", replace(c, modules=(("nobody", "rows"),)))


def test_experts_lie_on_the_ranks_that_share_the_batch():
    moe = graph("moe:layers=2,width=64,batch=8,seq=16")
    plan = plan_like(moe, parse_cluster("4xH100"), Configuration("megatron", replicate=4, expert=4)).plan
    found = recognise(plan, moe).configuration
    assert found.expert == 4 and found.data == 4
    said = followed("4xH100", Configuration("megatron", replicate=4, expert=2)).remarks
    assert [r.key for r in said] == ["expert"] and "no experts" in said[0].why


def test_stages_begin_where_the_file_says():
    c = Configuration("torchtitan", pipeline=2, microbatches=4, cuts=("layers.3",))
    found = recognise(followed("2xH100", c).plan, graph()).configuration
    assert found.cuts == ("blocks.3",)
    with pytest.raises(ConfigurationError, match=r"begin at layers\.9"):
        followed("2xH100", replace(c, cuts=("layers.9",)))


def test_what_cannot_be_followed_is_a_sentence():
    with pytest.raises(ConfigurationError, match="that makes 3 devices, not 4"):
        followed("4xH100", Configuration("torchtitan", shard=3))
    with pytest.raises(ShardwrightError) as caught:
        followed("8xH100", Configuration("megatron", tensor=8, pipeline=1, microbatches=16, shard=2))
    assert caught.value.remedy


def test_rows_of_a_file():
    titan = read_configuration(FILES / "torchtitan/llama3_70b.toml")
    assert rows_asked(titan, 64) == 64
    assert rows_asked(read_configuration(FILES / "deepspeed/zero1.json"), 8) is None


def test_every_single_change_keeps_devices_rows_and_what_is_to_be_kept():
    c = Configuration("plan", replicate=2, shard=4, tensor=4, sequence=True, microbatch=4).on(32)
    changes = dict(single_changes(c))
    assert len(changes) > 15
    for what, changed in changes.items():
        assert changed.on(32, c.batch).batch == c.batch, what
        assert canonical(changed).difference(canonical(c)), what
    for what, changed in single_changes(c, keep=("tensor", "pipeline", "recompute")):
        assert (changed.tensor, changed.pipeline, changed.recompute) == (4, 1, "none"), what
    with pytest.raises(ConfigurationError, match="nothing called 'colour'"):
        check_kept(["colour"])


def test_deep_models_are_judged_by_two_short_ones():
    deep = graph("gpt:layers=12,width=256,heads=4,vocab=512,batch=8,seq=64")
    cluster = parse_cluster("4xH100")
    for c in (
        Configuration("plan", shard=4, recompute="blocks"),
        Configuration("plan", pipeline=2, shard=2, microbatches=4),
    ):
        whole = plan_like(deep, cluster, c).plan.prediction
        told = judge(deep, cluster, c.on(4, 8))
        assert told.seconds == pytest.approx(whole.step_seconds, rel=0.02)
        assert told.bytes == pytest.approx(whole.memory_bytes, rel=0.02)


def test_changes_that_pay_lead_to_a_faster_configuration():
    cluster = parse_cluster("4xH100")
    slow = Configuration("plan", shard=4, recompute="blocks", microbatches=4).on(4, 16)
    best, made = improve(graph(), cluster, slow, keep=("shard",))
    assert best.shard == 4 and best.recompute == "none" and made
    before, after = (judge(graph(), cluster, c) for c in (slow, best))
    assert after.seconds < before.seconds
    assert best.difference(slow).keys() >= {"recompute"}


def test_what_does_not_fit_is_changed_until_it_does():
    options = Options(memory_limit=0.9 * judge(graph(), parse_cluster("4xH100"), Configuration("p", replicate=4)).bytes)
    c = Configuration("plan", replicate=4).on(4, 16)
    found = judged_changes(graph(), parse_cluster("4xH100"), c, options)
    assert found[0].fits and [one.seconds for one in found if one.fits] == sorted(o.seconds for o in found if o.fits)
    assert not all(one.fits for one in found)
    best, made = improve(graph(), parse_cluster("4xH100"), c, options)
    assert judge(graph(), parse_cluster("4xH100"), best, options).fits and made


@pytest.mark.parametrize(
    ("name", "cluster", "batch"),
    [
        ("torchtitan/llama3_8b.toml", "4xH100", 16),
        ("torchtitan/debug_model.toml", "4xH100", 16),
        ("torchtitan/llama3_70b.toml", "2x8xH100", 16),
        ("torchtitan/llama3_70b_4d.toml", "8x8xH100", 16),
        ("megatron/llama3_8b_fp8.sh", "4xH100", 16),
        ("megatron/t5_220m.sh", "4xH100", 16),
        ("deepspeed/zero1.json", "4xH100", 16),
        ("deepspeed/zero2_megatron.json", "4xH100", 16),
        ("deepspeed/zero3_offload.json", "4xH100", 16),
        ("accelerate/fsdp.yaml", "2xH100", 16),
        ("accelerate/nd.yaml", "8xH100", 16),
        ("accelerate/tp_hsdp.yaml", "8xH100", 16),
        ("accelerate/cp.yaml", "8xH100", 16),
        ("accelerate/deepspeed.yaml", "4xH100", 16),
    ],
)
def test_published_files_become_plans(name, cluster, batch):
    """On a small model: their rows a step are given up for its own."""
    c = replace(read_configuration(FILES / name), cuts=(), batch=None)
    if batch // (c.microbatch or 1) < 16:
        c = replace(c, microbatch=None, microbatches=c.microbatches)
    found = followed(cluster, c)
    back = canonical(recognise(found.plan, graph()).configuration)
    assert not back.difference(canonical(found.configuration)).keys() & {
        "replicate", "shard", "context", "tensor", "pipeline", "sequence", "sharding", "recompute", "schedule",
    }  # fmt: skip
    json.dumps(found.configuration.as_dict())


def test_tensor_parallelism_cuts_words_of_the_loss_and_no_row_of_a_norm() -> None:
    """As engines do it: each rank has some words of the logits, and whole rows of what is normalised."""
    wide = "llama:layers=2,width=512,heads=8,kv_heads=8,inner=1024,vocab=32768,batch=4,seq=512"
    for sequence in (False, True):
        c = Configuration("plan", tensor=4, sequence=sequence)
        splits = plan_like(graph(wide), parse_cluster("4xH100"), c).plan.stages[0].strategy.splits
        norms = {cuts for op, cuts in splits.items() if op.startswith("rms_norm")}
        assert norms == ({("i1",)} if sequence else {(None,)})
        assert {cuts for op, cuts in splits.items() if op.startswith("cross_entropy")} == {("c",)}


def test_what_crosses_a_border_arrives_as_the_stage_before_leaves_it() -> None:
    """Every rank receives its own rows and, with sequence parallelism, positions: not the whole micro-batch."""
    _, c = RECIPES["three degrees"]
    plan = followed("8xH100", c).plan
    made = {name for op in graph().ops for name in op.outputs}
    arrives = [layout for name, layout in plan.stages[1].strategy.resting.items() if name in made]
    assert (Shard(0), Shard(1)) in arrives, arrives


def test_a_stage_of_one_block_recomputes_it_too() -> None:
    plan = followed("4xH100", Configuration("plan", pipeline=4, microbatches=4, recompute="blocks")).plan
    assert [stage.strategy.recomputed for stage in plan.stages] == [(f"blocks.{n}",) for n in range(4)]
