"""A plan written for another engine: what is lost is listed, and what was written is priced as it stands."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import shardwright
from exchange.test_planning import RECIPES, followed, graph
from shardwright.cluster import parse_cluster
from shardwright.exchange import Configuration, ConfigurationError, read_configuration
from shardwright.exchange.exporting import export
from shardwright.exchange.expressing import ENGINES
from shardwright.exchange.planning import plan_like
from shardwright.plans import Plan
from shardwright.plans.plan import Serving

FILES = Path(__file__).parents[1] / "data" / "exchange"
BLOCKLESS = "hf:t5:small"


@cache
def plan(name: str) -> Plan:
    return followed(*RECIPES[name]).plan


def test_what_an_engine_can_express_costs_nothing():
    exported = shardwright.export(plan("fsdp"), to="torchtitan", graph=graph())
    assert exported.lost == () and exported.refusal == "" and exported.price_seconds == 0
    assert exported.priced is not None and exported.priced.prediction == exported.plan.prediction


def test_what_is_lost_is_listed_and_priced():
    exported = export(plan("light recomputation"), to="accelerate", graph=graph())
    assert [remark.key for remark in exported.lost] == ["recompute"]
    # Whole blocks are recomputed instead, which is more work.
    assert exported.price_seconds is not None and exported.price_seconds > 0
    assert {remark.key for remark in exported.unsaid} >= {"batch", "microbatches"}
    said = exported.as_dict()
    assert said["price_seconds"] == exported.price_seconds and said["lost"][0]["key"] == "recompute"


def test_a_lost_optimizer_is_priced_as_what_there_is_instead():
    c = Configuration("plan", shard=4, optimizer="sgd")
    plain = plan_like(graph(), parse_cluster("4xH100"), c).plan
    exported = export(plain, to="torchtitan", graph=graph())
    assert [remark.key for remark in exported.lost] == ["optimizer"]
    assert exported.priced is not None and exported.priced.optimizer == "adamw"
    assert exported.price_seconds is not None and exported.price_seconds > 0
    assert export(plain, to="deepspeed", graph=graph(), price=False).priced is None


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gets_a_file_that_says_it(engine, tmp_path):
    name = "tensor" if engine == "hf" else "zero-1"
    exported = export(plan(name), to=engine, graph=graph())
    assert exported.priced is not None or exported.refusal
    if engine == "hf":
        return  # its reader takes model configurations, which are told from a tp_plan alone by transformers
    path = tmp_path / exported.file_name
    exported.save(path)
    back = read_configuration(path).on(plan(name).devices, 16)
    assert (back.replicate, back.shard, back.tensor, back.pipeline) == tuple(
        getattr(exported.configuration, degree) for degree in ("replicate", "shard", "tensor", "pipeline")
    )


def test_in_a_file_of_theirs_only_what_differs_is_changed():
    base = FILES / "deepspeed" / "zero1.json"
    exported = export(plan("zero-2"), to="deepspeed", base=base, graph=graph())
    before, after = json.loads(base.read_text()), json.loads(exported.text)
    assert after["zero_optimization"] == before["zero_optimization"] | {"stage": 2}
    assert after["fp16"] == {name: value for name, value in before["fp16"].items() if name != "enabled"}  # float32
    assert list(after) == list(before)


def test_what_cannot_be_exported_is_a_sentence():
    for asked, message in (
        ({"to": "abacus"}, "not exported to 'abacus'"),
        ({"to": "hf"}, "cuts no weights by features"),
        ({"to": "pytorch", "base": FILES / "README.md"}, "is written whole"),
    ):
        with pytest.raises(ConfigurationError, match=message) as caught:
            export(plan("fsdp"), graph=graph(), **asked)
        assert caught.value.remedy
    with pytest.raises(ConfigurationError, match="for inference"):
        export(replace(plan("fsdp"), serving=Serving()), to="pytorch", graph=graph())


def test_the_name_that_people_use():
    plain, other = (export(plan("fsdp"), to=name, graph=graph()) for name in ("pytorch", "fsdp2"))
    assert plain.text == other.text and plain.file_name == "parallelize.py"


def test_stages_that_plain_modules_cannot_be_are_refused():
    """A mixture's router hands its loss past the cut; a network without repeated blocks has no list to cut."""
    c = Configuration("plan", pipeline=2, microbatches=2)
    for model, message in (("moe:layers=2,width=64,batch=16,seq=16", "2 tensors cross"), (BLOCKLESS, "no repeated")):
        plan = plan_like(graph(model), parse_cluster("2xH100"), c).plan
        with pytest.raises(ConfigurationError, match=message) as caught:
            export(plan, to="pytorch", graph=graph(model), price=False)
        assert "--stages 1" in caught.value.remedy


def test_what_the_code_does_otherwise_stands_at_its_top():
    moe = "moe:layers=2,width=64,batch=16,seq=16"
    plan = plan_like(graph(moe), parse_cluster("4xH100"), Configuration("plan", shard=2, tensor=2)).plan
    exported = export(plan, to="pytorch", graph=graph(moe), price=False)
    assert [remark.key for remark in exported.lost] == ["weights cut by features"]
    top = " ".join(exported.text.split('"""')[1].split())
    assert "What the plan has, and this file does otherwise: - weights cut by features" in top
