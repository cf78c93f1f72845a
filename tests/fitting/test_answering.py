"""Whether it fits, and what makes it fit: every row replayed, every suggestion below the limit, the cheapest first."""

from __future__ import annotations

import pytest
import torch

import shardwright
from fitting.test_account import SMALL, graph
from shardwright.cluster import parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.exchange import Configuration
from shardwright.fitting import Fitting, account, fits_graph
from shardwright.fitting.ways import single_changes, usual_ways
from shardwright.planner import Options


def asked(limit: float | None = None, cluster: str = "8xH100", rows: int = 16, **about: object) -> Fitting:
    options = Options(memory_limit=limit)
    return fits_graph(graph(SMALL, rows), parse_cluster(cluster), options, **about)  # type: ignore[arg-type]


def test_the_usual_ways_are_priced_and_less_is_needed_the_more_is_divided() -> None:
    found = asked()
    need = {fit.name: fit.bytes for fit in found.ways}
    assert list(need) == ["data-parallel", "zero-1", "zero-2", "fsdp", "megatron", "fsdp+tensor"]
    assert need["fsdp"] < need["zero-2"] <= need["zero-1"] < need["data-parallel"] and found.fits
    assert found.limit + sum(size for _, size in found.reserves) == found.memory
    assert found.best is not None and found.best.seconds == min(fit.seconds for fit in found.ways)
    assert found.fewest is not None and found.fewest.devices == 1


def test_what_is_advised_fits_and_is_replayed_and_the_cheapest_comes_first() -> None:
    free = {fit.name: fit.bytes for fit in asked().ways}
    limit = 0.9 * min(free.values())
    found = asked(limit)
    assert not found.fits and found.changes and found.fewest is None
    costs = [change.fit.seconds * change.fit.devices for change in found.changes]
    assert costs == sorted(costs)
    for change in found.changes:
        assert change.fit.fits and change.fit.bytes <= limit
        where = parse_cluster(f"{change.fit.devices}xH100" if change.fit.devices <= 8 else "2x8xH100")
        again = account(graph(SMALL, 16), where, change.fit.configuration, Options(memory_limit=limit))
        assert again.bytes == change.fit.bytes and again.seconds == change.fit.seconds


def test_the_way_that_is_asked_about_is_the_one_that_is_mended() -> None:
    need = {fit.name: fit.bytes for fit in asked().ways}
    found = asked(0.99 * need["data-parallel"], search="data-parallel")
    assert found.asked and not found.fits and found.ways[0].name == "data-parallel"
    words = {word for change in found.changes for word in change.what}
    assert "ZeRO-1" in words and any("micro-batches" in word or "tensor" in word for word in words)
    assert any(fit.fits for fit in found.ways[1:])


def test_several_changes_are_made_together_where_none_suffices() -> None:
    least = min(change.fit.bytes for change in asked(0.9 * min(f.bytes for f in asked().ways)).changes)
    found = asked(0.97 * least)
    assert all(len(change.what) > 1 for change in found.changes)
    assert not asked(1e6).changes and asked(1e6).best is None


def test_another_engines_half_precision_has_float32_state() -> None:
    told = Configuration("megatron", "job.toml", shard=8, precision="bfloat16", microbatch=2)
    found = asked(like=told)
    (theirs,) = (fit for fit in found.ways if fit.name == "job.toml")
    plain = next(fit for fit in asked().ways if fit.name == "fsdp")
    assert found.ways[0] is theirs and theirs.configuration.optimizer == "adamw-float32"
    assert theirs.kind("optimizer state") == 2 * plain.kind("optimizer state")
    beside = next(fit for fit in found.ways if fit.name == "fsdp")
    assert beside.bytes == pytest.approx(theirs.bytes)


def test_what_is_impossible_is_said_and_the_rest_is_answered() -> None:
    found = asked(rows=4)
    refused = {fit.name: fit.refusal for fit in found.ways if fit.refusal}
    assert "fsdp" in refused and "4 rows" in refused["fsdp"] and found.fits
    with pytest.raises(ShardwrightError, match="There is no way 'magic'"):
        asked(search="magic")
    with pytest.raises(ShardwrightError, match="two questions"):
        asked(search="fsdp", like=Configuration("x", shard=8))


def test_on_one_device_there_is_one_way() -> None:
    found = asked(cluster="1xH100", search="fsdp")
    assert [fit.name for fit in found.ways] == ["fsdp", "one device"]
    assert asked(cluster="1xH100").ways[0].name == "one device"


def test_changes_of_a_way_are_ways_of_their_own() -> None:
    cluster = parse_cluster("8xH100")
    for c in usual_ways(cluster, 32, "adamw").values():
        here = c.on(8, 32)
        for what, changed in single_changes(here, cluster):
            assert changed != here, what
            assert changed.on(8, 32).batch == 32


def test_from_python() -> None:
    with torch.device("meta"):
        model, x = torch.nn.Linear(64, 64), torch.empty(16, 64)
    found = shardwright.fits(model, (x,), cluster="2xH100")
    assert found.fits and found.batch == 16 and found.captured_seconds > 0
    assert not shardwright.fits(model, (x,), cluster="2xH100", memory_limit=1e3).fits


def test_a_compiled_step_keeps_less_and_a_file_is_told_what_the_allocator_reserves() -> None:
    plain, compiled = asked(), asked(compiled=True)
    for before, after in zip(plain.ways, compiled.ways, strict=True):
        assert after.configuration.recompute == "light" and after.bytes <= before.bytes and before.reserved is None
    told = Configuration("torchtitan", "job.toml", shard=8, precision="bfloat16", microbatch=2)
    theirs = asked(like=told).ways[0]
    assert theirs.reserved is not None and theirs.reserved >= theirs.bytes
