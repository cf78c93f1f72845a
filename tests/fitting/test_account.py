"""An account is the replay that judges plans; of a deep model two short replays say what that of all blocks would."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from shardwright.cluster import parse_cluster
from shardwright.exchange import Configuration
from shardwright.exchange.planning import plan_like
from shardwright.fitting import account, taken
from shardwright.fitting import account as accounts
from shardwright.fitting.engines import computes_again, met, of_one_rank, shorter_rows
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.graph.shorten import longest_run
from shardwright.planner import Options
from shardwright.simulator import simulate_plan
from shardwright.zoo.reference import resolve

SMALL = "gpt:layers=2,width=256,heads=8,vocab=512,seq=64"
DEEP = "llama:layers=18,width=4096,heads=32,kv_heads=8,inner=11008,vocab=32000,seq=2048"


@cache
def graph(model: str, batch: int = 8) -> Graph:
    found = resolve(model, batch=batch, dtype="bfloat16")
    return capture(found.model, found.args, found.kwargs)


def settled(**decisions: Any) -> Configuration:
    return Configuration("way", **decisions).on(8, 8)


WAYS: dict[str, dict[str, Any]] = {
    "data-parallel": {"replicate": 8},
    "fsdp": {"shard": 8},
    "zero-1": {"shard": 8, "sharding": "optimizer", "reshard": False},
    "recomputed": {"shard": 8, "recompute": "blocks"},
    "light": {"replicate": 8, "recompute": "light"},
    "tensor": {"tensor": 8, "sequence": True},
    "both": {"shard": 4, "tensor": 2, "sequence": True},
    "accumulated": {"replicate": 4, "tensor": 2, "microbatches": 2},
    "mixed": {"shard": 8, "optimizer": "adamw-float32"},
}


@pytest.mark.parametrize("name", WAYS)
def test_it_is_what_the_plan_of_that_configuration_says(name: str) -> None:
    here = account(graph(SMALL), parse_cluster("8xH100"), settled(**WAYS[name]))
    plan = plan_like(graph(SMALL), parse_cluster("8xH100"), settled(**WAYS[name])).plan
    assert here.whole and here.bytes == pytest.approx(plan.prediction.memory_bytes)
    assert here.seconds == pytest.approx(plan.prediction.step_seconds)
    assert sum(size for _, size in here.kinds) == pytest.approx(here.bytes)
    assert abs(dict(here.kinds).get("allocator", 0.0)) < 0.2 * here.bytes + 32e6


@pytest.mark.parametrize("name", ["data-parallel", "fsdp", "recomputed", "both", "mixed"])
def test_two_short_models_say_what_the_deep_one_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deep, cluster, c = graph(DEEP), parse_cluster("8xH100"), settled(**WAYS[name])
    short = account(deep, cluster, c)
    run = longest_run(deep)
    assert run is not None and run.count == 18 and not short.whole
    monkeypatch.setattr(accounts_module(), "BLOCKS", run.count)
    whole = account(deep, cluster, c)
    assert whole.whole and short.bytes == pytest.approx(whole.bytes, rel=0.01)
    assert short.seconds == pytest.approx(whole.seconds, rel=0.01)
    for kind, size in whole.kinds:
        assert dict(short.kinds).get(kind, 0.0) == pytest.approx(size, abs=0.02 * whole.bytes), kind


def accounts_module() -> Any:
    import importlib

    return importlib.import_module(accounts.__module__)


def test_a_peak_that_moves_to_the_update_in_depth_is_found() -> None:
    """With little activation and much to update a short model holds most at its loss and a deep one in AdamW's step."""
    cluster = parse_cluster("8xH100")
    c = settled(replicate=8, recompute="blocks", microbatches=1)
    here = account(graph(DEEP.replace("seq=2048", "seq=64")), cluster, c, Options())
    assert dict(here.kinds)["gradients"] > 0.9 * dict(here.kinds)["parameters"]


def test_mixed_precision_keeps_parameters_and_state_in_float32() -> None:
    cluster = parse_cluster("8xH100")
    half, full = (
        dict(account(graph(SMALL), cluster, settled(replicate=8, optimizer=name)).kinds)
        for name in ("adamw", "adamw-float32")
    )
    assert full["parameters"] == 3 * half["parameters"]
    assert full["optimizer state"] == 2 * half["optimizer state"]
    assert full["gradients"] == pytest.approx(2 * half["gradients"], rel=0.01)


def test_one_device_runs_the_model_as_it_is() -> None:
    """Nothing is recorded there, so what the allocator hands out is what it takes, the optimizer's temporaries included."""
    here = account(graph(SMALL), parse_cluster("1xH100"), Configuration("way").on(1, 8))
    plan = plan_like(graph(SMALL), parse_cluster("1xH100"), Configuration("way").on(1, 8)).plan
    (stage,) = {simulate_plan(plan, graph(SMALL)).stage()}
    assert here.bytes == stage.memory.peak and stage.planned is not None


PIPELINE: dict[str, Any] = {"shard": 4, "pipeline": 2, "microbatches": 2, "reshard": False, "recompute": "blocks"}


def kinds_like(engine: str, **decisions: Any) -> dict[str, float]:
    """What a pipeline of torchtitan's takes, or the same decisions without a name that means anything."""
    c = Configuration(engine, optimizer="adamw-float32", **PIPELINE | decisions).on(8, 8)
    found = account(graph(TALL), parse_cluster("8xH100"), c)
    assert sum(size for _, size in found.kinds) == pytest.approx(found.bytes)
    return {**dict(found.kinds), "all": found.bytes}


TALL = "llama:layers=4,width=2048,heads=16,kv_heads=16,inner=8192,vocab=512,seq=64"


def test_torchtitan_keeps_gathered_parameters_and_float32_gradients_between_passes() -> None:
    """Facts of its engine (:mod:`shardwright.fitting.engines`): 2 bytes of a parameter gathered, 4 of its gradient."""
    ours, theirs = kinds_like("way"), kinds_like("torchtitan")
    first = [p.tensor for p in graph(TALL).parameters if p.paths[0].startswith(("blocks.0.", "blocks.1."))]
    stage = sum(graph(TALL).tensors[name].bytes for name in first)
    assert theirs["gathered copies"] >= stage > ours["gathered copies"]
    assert theirs["gradients"] >= 2 * stage and theirs["gradients"] == pytest.approx(2 * ours["gradients"], rel=0.1)
    more = theirs["gathered copies"] - ours.get("gathered copies", 0.0) + theirs["gradients"] - ours["gradients"]
    more += theirs["parameters"] - ours["parameters"]
    assert theirs["all"] == pytest.approx(ours["all"] + more, rel=0.01)


def test_torchtitan_that_reshards_keeps_neither() -> None:
    theirs, ours = kinds_like("torchtitan", reshard=True), kinds_like("way", reshard=True)
    less = ours.pop("parameters") - theirs.pop("parameters")
    assert ours.pop("all") - theirs.pop("all") == pytest.approx(less)
    assert theirs == pytest.approx(ours)


def test_torchtitans_parameters_rest_in_float32_alone() -> None:
    """FSDP2's shards become half precision on their way into an all-gather; ours rest in both."""
    kinds = {
        name: dict(account(graph(SMALL), parse_cluster("8xH100"), mixed(name)).kinds) for name in ("torchtitan", "way")
    }
    assert kinds["torchtitan"].pop("parameters") == pytest.approx(kinds["way"].pop("parameters") * 4 / 6)
    assert kinds["torchtitan"] == pytest.approx(kinds["way"])


def mixed(engine: str) -> Configuration:
    return Configuration(engine, shard=8, optimizer="adamw-float32").on(8, 8)


def test_a_device_of_context_parallelism_has_its_own_positions_and_the_keys_and_values_of_all() -> None:
    """Two ranks share each of four sequences of 128 positions: eight rows of 64, parameters divided over all eight."""
    asked = Configuration("torchtitan", shard=4, context=2, optimizer="adamw-float32", batch=4, length=128)
    own, ring = of_one_rank(asked)
    assert (own.shard, own.context, own.batch, own.length, ring) == (8, 1, 8, 64, 2)
    there = account(graph(SMALL), parse_cluster("8xH100"), own.on(8, 8), ring=ring)
    alone = account(graph(SMALL), parse_cluster("8xH100"), own.on(8, 8))
    both = 2 * 2 * (64 * 256 * 2)  # keys and values, of two ranks: 64 positions of 256 features in bfloat16
    gathered = dict(there.kinds)["gathered copies"] - dict(alone.kinds).get("gathered copies", 0.0)
    assert met(graph(SMALL), own.on(8, 8), ring) == both and gathered in (0.0, both)
    assert there.bytes - alone.bytes <= both
    within = {"torchtitan": 4, "megatron": 1}
    for engine, shard in within.items():  # where nothing is divided, Megatron's ranks stay replicas
        own, _ = of_one_rank(Configuration(engine, replicate=2, shard=shard, context=2))
        assert (own.replicate, own.shard) == ((2, 8) if engine == "torchtitan" else (4, 1))


def test_a_batch_is_cut_into_shorter_rows_or_not_at_all() -> None:
    tokens, named = torch.arange(16).reshape(2, 8), {"labels": torch.arange(16).reshape(2, 8), "use_cache": False}
    args, kwargs = shorter_rows((tokens,), named, 4) or ((), {})
    assert (
        args[0].tolist()[:2] == [[0, 1], [2, 3]] and kwargs["labels"].shape == (8, 2) and kwargs["use_cache"] is False
    )
    assert shorter_rows((tokens, torch.zeros(2, 4)), {}, 4) is None
    assert shorter_rows((tokens,), {}, 3) is None and shorter_rows((), {}, 2) is None


@pytest.mark.parametrize("blocks", [20, 22])
def test_a_pipeline_of_two_short_models_says_what_the_deep_one_takes(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shorter has two blocks in every stage, the longer four, the deep one five, or in some stages six."""
    deep = graph(f"llama:layers={blocks},width=2048,heads=16,kv_heads=16,inner=14336,vocab=512,seq=64")
    c = Configuration("torchtitan", optimizer="adamw-float32", **PIPELINE | {"shard": 2, "pipeline": 4}).on(8, 8)
    short = account(deep, parse_cluster("8xH100"), c)
    monkeypatch.setattr(accounts_module(), "BLOCKS", blocks)
    whole = account(deep, parse_cluster("8xH100"), c)
    assert whole.whole and not short.whole and short.bytes == pytest.approx(whole.bytes, rel=1e-6)


def test_the_allocator_reserves_what_is_in_use_at_once_and_its_fragments() -> None:
    """One pass forward and one back are served in turn: at least what lives at once, at most all that ever lived."""
    cluster, c = parse_cluster("8xH100"), settled(shard=8)
    most = taken(graph(SMALL), cluster, c)
    use = simulate_plan(plan_like(graph(SMALL), cluster, c).plan, graph(SMALL)).stage().memory
    live = [one for one in use.storages if "inside adamw" not in one.what]  # a fused update makes nothing
    at_once = max(sum(one.bytes for one in live if one.born <= now <= one.dies) for now in range(len(use.curve)))
    assert at_once <= most <= sum(max(one.bytes, 512) for one in live) + 22 * 2**20
    fewer = taken(graph(SMALL), cluster, settled(shard=8, recompute="blocks"))
    assert fewer <= most


def test_every_micro_batch_of_a_pipeline_is_served_and_let_go_of() -> None:
    """Twice the micro-batches, half as large each: what is reserved does not grow, for passes follow one another."""
    few, many = (
        taken(
            graph(TALL), parse_cluster("8xH100"), Configuration("way", **PIPELINE | {"microbatches": count}).on(8, 16)
        )
        for count in (2, 4)
    )
    assert many < 1.05 * few
    kept = taken(graph(TALL), parse_cluster("8xH100"), Configuration("torchtitan", **PIPELINE).on(8, 8))
    again = taken(graph(TALL), parse_cluster("8xH100"), Configuration("way", **PIPELINE | {"reshard": True}).on(8, 8))
    assert kept > again


def test_torchtitans_selective_recomputation_computes_every_second_product_again() -> None:
    c = Configuration("torchtitan", shard=8, recompute="light").on(8, 8)
    again = computes_again(graph(TALL), c)
    assert {path.partition(".")[2].partition(".")[2] for path in again} == {
        "attention.key",
        "attention.output",
        "feed.up",
    }
    assert len(again) == 3 * 4 and not computes_again(graph(TALL), replace(c, engine="way"))
    theirs, ours = (
        account(graph(TALL), parse_cluster("8xH100"), replace(c, engine=name)) for name in ("torchtitan", "way")
    )
    up = 64 * 8192 * 2  # one row of 64 positions of a device
    more = dict(ours.kinds)["activations"] - dict(theirs.kinds)["activations"]
    assert more >= up and theirs.bytes < ours.bytes
    assert taken(graph(TALL), parse_cluster("8xH100"), c) <= taken(
        graph(TALL), parse_cluster("8xH100"), replace(c, engine="way")
    )
