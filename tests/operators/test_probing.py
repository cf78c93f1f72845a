"""Operators nobody described: what holds when they are run is kept, on disk too; the rest is replicated with a reason."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Shard

from operators.custom import define
from shardwright import caches
from shardwright.operators import analyse, probing
from shardwright.operators.deriving import forget
from shardwright.verification.auditing import audit_sample
from shardwright.verification.samples import concrete


def test_probed_rules_hold_at_the_real_size():
    sample = concrete("shardwright_tests.product.default", (torch.randn(30, 64), torch.randn(64, 20)))
    forget()
    rules = analyse(sample.op, sample.tensors)
    assert rules.origin == "probed"
    found = {(loop.inputs, loop.outputs) for loop in rules.loops}
    assert any(outputs == (Shard(0),) and inputs[0] == Shard(0) for inputs, outputs in found)
    assert any(outputs == (Shard(1),) and inputs[1] == Shard(1) for inputs, outputs in found)
    assert ((Shard(1), Shard(0)), (Partial("sum"),)) in found
    assert audit_sample(sample, pieces=(2,), pairs=False).disagreement is None


def test_what_looks_at_a_whole_row_is_not_cut_along_it():
    sample = concrete("shardwright_tests.squares.default", (torch.randn(20, 32),))
    forget()
    rules = analyse(sample.op, sample.tensors)
    assert [loop.inputs for loop in rules.loops] == [(Shard(0),)]


def test_probed_rules_are_read_from_disk(monkeypatch):
    sample = concrete("shardwright_tests.squares.default", (torch.randn(20, 32),))
    first = probing.probe(sample.op, sample.tensors)
    monkeypatch.setattr(probing, "_probe", lambda *a: (_ for _ in ()).throw(AssertionError("probed twice")))
    assert probing.probe(sample.op, sample.tensors) == first
    assert len(list(caches.cache_folder(probing.KIND).glob("*.json"))) == 1


def test_probed_operators_are_listed():
    from shardwright.verification.listing import listing

    sample = concrete("shardwright_tests.squares.default", (torch.randn(20, 32),))
    probing.probe(sample.op, sample.tensors)
    (entry,) = [e for e in listing() if e.target == "shardwright_tests.squares.default"]
    assert entry.origin == "probed" and entry.loops == ("p1: shard",)


def test_a_broken_cache_file_is_probed_again():
    sample = concrete("shardwright_tests.squares.default", (torch.randn(20, 32),))
    first = probing.probe(sample.op, sample.tensors)
    (file,) = caches.cache_folder(probing.KIND).glob("*.json")
    file.write_text("{")
    assert probing.probe(sample.op, sample.tensors) == first


def test_random_and_failing_operators_are_replicated_with_a_reason():
    @torch.library.custom_op("shardwright_tests::noise", mutates_args=())
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)

    sample = concrete("shardwright_tests.noise.default", (torch.randn(20, 32),))
    rules = probing.probe(sample.op, sample.tensors)
    assert rules.origin == "replicated" and "differently" in rules.reason

    @torch.library.custom_op("shardwright_tests::picky", mutates_args=())
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.shape != (600, 600):
            raise ValueError("no")
        return x.clone()

    sample = concrete("shardwright_tests.picky.default", (torch.randn(600, 600),))
    rules = probing.probe(sample.op, sample.tensors)
    assert rules.origin == "replicated" and "could not be run" in rules.reason


def test_an_operator_that_was_edited_since_is_probed_again():
    how = {"edited": False}

    define("moody", lambda x: x - x.mean(0) if how["edited"] else 2 * x, ["x"])
    sample = concrete("shardwright_tests.moody.default", (torch.randn(20, 32),))
    before = {loop.inputs for loop in probing.probe(sample.op, sample.tensors).loops}
    how["edited"] = True  # under the same name, with the same schema: the rule on disk no longer holds
    after = {loop.inputs for loop in probing.probe(sample.op, sample.tensors).loops}
    assert {(Shard(0),), (Shard(1),)} <= before and (Shard(1),) in after and (Shard(0),) not in after
