"""What is written says what was meant when it is read back; a file that exists changes only where it must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from exchange.configurations import configurations
from exchange.test_reading import PUBLISHED
from shardwright.exchange import Configuration, ConfigurationError, read_configuration
from shardwright.exchange.expressing import ENGINES, canonical, nearest
from shardwright.exchange.writing import WRITERS, parse, written

FILES = Path(__file__).parents[1] / "data" / "exchange"


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=60, deadline=None)
@given(configuration=configurations())
def test_what_is_written_is_read_as_it_was(engine, configuration):
    try:
        found = nearest(configuration, engine)
    except ConfigurationError as error:
        assert error.remedy
        return
    assert nearest(found.configuration, engine).lost == ()
    back = parse(WRITERS[engine](found.in_file), engine)
    devices, batch = configuration.devices or 1, configuration.batch
    difference = canonical(back.on(devices, batch)).difference(canonical(found.in_file.on(devices, batch)))
    assert not difference
    if not found.lost and not found.unsaid:
        said = replace(configuration, modules=()) if not ENGINES[engine].modules else configuration
        assert not canonical(back.on(devices, batch)).difference(canonical(said))


def settled(name: str) -> Configuration:
    """A published file on the devices it is for, 128 where it does not say."""
    found = read_configuration(FILES / name)
    devices = found.devices or 128
    rows = devices * (found.microbatch or 1) if name == "deepspeed/zero2_megatron.json" else None
    return found.on(devices, rows or found.batch)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_written_back_says_the_same(name):
    engine, text = name.partition("/")[0], (FILES / name).read_text()
    found = nearest(settled(name), engine)
    assert found.lost == ()
    assert written(found, text, str(FILES / name)) == text
    again = parse(written(found), engine).on(found.configuration.devices or 1, found.configuration.batch)
    difference = canonical(again).difference(canonical(found.in_file.on(again.devices or 1, again.batch)))
    assert not difference


@pytest.mark.parametrize(
    ("name", "changes", "gone", "come"),
    [
        (
            "torchtitan/llama3_70b_4d.toml",
            {"tensor": 16, "devices": 256},
            ["tensor_parallel_degree = 8"],
            ["tensor_parallel_degree = 16"],
        ),
        (
            "torchtitan/llama3_405b.toml",
            {"recompute": "none", "replicate": 2, "shard": 8},
            ["data_parallel_replicate_degree = 1", 'mode = "full"'],
            ["data_parallel_replicate_degree = 2", 'mode = "none"'],
        ),
        (
            "megatron/gpt3_175b.sh",
            {"tensor": 16, "sequence": True, "devices": 256},
            ["--nnodes $NUM_NODES", "--tensor-model-parallel-size 8"],
            ["--nnodes 32", "--sequence-parallel --tensor-model-parallel-size 16"],
        ),
        ("megatron/bert_340m.sh", {"precision": "float32"}, ["--fp16"], []),
        (
            "deepspeed/zero3_megatron.json",
            {"sharding": "optimizer", "reshard": False},
            ['"stage": 3,'],
            ['"stage": 1,'],
        ),
        ("accelerate/tp_hsdp.yaml", {"tensor": 4, "replicate": 1, "batch": 2}, 2, 2),
        ("accelerate/fsdp.yaml", {"reshard": False}, 0, 2),
    ],
)
def test_only_what_differs_is_changed(name, changes, gone, come):
    engine, text = name.partition("/")[0], (FILES / name).read_text()
    changed = written(nearest(replace(settled(name), **changes), engine), text, str(FILES / name))
    before, after = [[line.strip() for line in one.splitlines()] for one in (text, changed)]
    lost, new = [line for line in before if line not in after], [line for line in after if line not in before]
    assert (lost if isinstance(gone, list) else len(lost)) == gone
    assert (new if isinstance(come, list) else len(new)) == come


@pytest.mark.parametrize(
    ("configuration", "engine", "message"),
    [
        (Configuration("plan", devices=2, shard=2), "hf", "cuts no weights by features"),
        (Configuration("plan", devices=2, shard=2), "abacus", "not exported to 'abacus'"),
        (
            Configuration("plan", devices=4, replicate=2, pipeline=2, batch=2, microbatch=1, microbatches=1),
            "accelerate",
            "",
        ),
        (
            Configuration("plan", devices=6, shard=2, pipeline=3, batch=4, microbatch=1, microbatches=2),
            "hf",
            "cuts no weights",
        ),
    ],
)
def test_what_an_engine_cannot_run_is_a_sentence(configuration, engine, message):
    if not message:
        assert nearest(configuration, engine).configuration.pipeline == 2
        return
    with pytest.raises(ConfigurationError, match=message) as caught:
        nearest(configuration, engine)
    assert caught.value.remedy


def test_what_is_lost_is_named():
    c = Configuration(
        "plan", devices=8, shard=4, tensor=2, sharding="optimizer", reshard=False, recompute="light", batch=4,
        microbatch=1, microbatches=1, precision="float16", optimizer="sgd",
    )  # fmt: skip
    assert {r.key for r in nearest(c, "torchtitan").lost} == {"sharding", "sequence", "precision", "optimizer"}
    assert {r.key for r in nearest(c, "deepspeed").lost} == {"recompute"}
    assert {r.key for r in nearest(c, "megatron").lost} == set()
    assert {r.key for r in nearest(c, "accelerate").unsaid} == {"microbatch", "microbatches", "batch", "optimizer"}
    pipelined = replace(c, devices=16, pipeline=2, tensor=1, schedule="zb-h1", shard=8, batch=8, cuts=("layers.1",))
    assert {r.key for r in nearest(pipelined, "deepspeed").lost} == {"schedule", "cuts", "recompute"}
    assert {r.key for r in nearest(replace(pipelined, context=2, devices=32, batch=16), "pytorch").lost} >= {"context"}


def test_a_script_that_starts_nothing_is_refused():
    found = nearest(Configuration("plan", devices=2, tensor=2, batch=2, microbatch=2, microbatches=1), "megatron")
    with pytest.raises(ConfigurationError, match="starts no Python file"):
        written(found, "--lr 1\n", "run.sh")
