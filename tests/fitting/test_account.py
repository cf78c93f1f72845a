"""An account is the replay that judges plans; of a deep model two short replays say what that of all blocks would."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from shardwright.cluster import parse_cluster
from shardwright.exchange import Configuration
from shardwright.exchange.planning import plan_like
from shardwright.fitting import account
from shardwright.fitting import account as accounts
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
    assert theirs["all"] == pytest.approx(ours["all"] + more, rel=0.01)


def test_torchtitan_that_reshards_keeps_neither() -> None:
    assert kinds_like("torchtitan", reshard=True) == kinds_like("way", reshard=True)


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
