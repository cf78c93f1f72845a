"""One parallelized GPT-2, called in many ways: each has its own program under the same strategy, and the right numbers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright
from lowering.strategies import mesh_with
from runtime.pipelines import halves, pipeline_plan
from runtime.workers import captured, device_mesh
from shardwright.errors import Infeasible, RunError
from shardwright.frontend import capture
from shardwright.operators.strategy import Strategy
from shardwright.planner.also import with_calls
from shardwright.plans import from_json, to_json
from shardwright.plans.transfer import carried, matched_operators
from shardwright.runtime import parallelize
from shardwright.runtime.shards import whole
from shardwright.schedules import RECIPES
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.verification.prepare import all_double

transformers = pytest.importorskip("transformers")
ROWS, LENGTH, VOCABULARY = 8, 12, 48
TWO = (2,)
"""As many ranks as it takes where calls follow each other; which rows and lengths there may be is asked of four."""


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@functools.lru_cache
def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=4, n_positions=32, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config).double()


@functools.lru_cache
@all_double()
def graph_of() -> Any:
    return captured(gpt2(), (), {"input_ids": tokens(ROWS, LENGTH), "labels": tokens(ROWS, LENGTH)})


@functools.lru_cache
def strategy_of(search: str, sizes: tuple[int, ...] = (4,)) -> Strategy:
    mesh = mesh_with(sizes)
    stated = formulate(graph_of(), mesh, within=restriction(search, len(sizes)))
    return stated.strategy(solve(stated.problem).answer)


def same(ours: Any, theirs: Any, what: str) -> None:
    torch.testing.assert_close(whole(ours), theirs, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}")


def same_gradients(ours: torch.nn.Module, theirs: torch.nn.Module, what: str) -> None:
    for name, parameter in ours.named_parameters():  # with stages, those of this rank
        same(parameter.grad, theirs.get_parameter(name).grad, f"{what}, {name}")


def split(search: str, sizes: tuple[int, ...]) -> Any:
    """GPT-2 on one mesh as a recipe cuts it, or in two stages in the order of a schedule."""
    if search in RECIPES:
        plan = pipeline_plan(graph_of(), halves(graph_of(), 2), 2, search)
        return parallelize(gpt2(), plan, graph=graph_of(), keep=True)
    return parallelize(gpt2(), strategy_of(search, sizes), mesh=device_mesh(sizes), graph=graph_of(), keep=True)


CALLS: dict[str, dict[str, Any]] = {
    "planned": {"rows": ROWS, "length": LENGTH},
    "fewer rows": {"rows": 6, "length": LENGTH},
    "shorter": {"rows": ROWS, "length": 7},
    "fewer rows than ranks": {"rows": 3, "length": 5},
    "one row": {"rows": 1, "length": LENGTH},
    "evaluation": {"rows": ROWS, "length": LENGTH, "training": False},
    "no labels": {"rows": 4, "length": LENGTH, "labels": False},
    "a mask": {"rows": ROWS, "length": LENGTH, "mask": True},
    "a cache": {"rows": 4, "length": 6, "cache": True},
}


def arguments(rows: int, length: int, labels: bool = True, mask: bool = False, cache: bool = False, **_: Any) -> Any:
    given: dict[str, Any] = {"input_ids": tokens(rows, length)}
    if labels:
        given["labels"] = tokens(rows, length)
    if mask:
        given["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
        given["attention_mask"][: rows // 2, length // 2 :] = 0
    return given | ({"use_cache": True} if cache else {})


@all_double()
def calls(rank: int, search: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    ours, theirs = split(search, sizes), copy.deepcopy(gpt2())
    for name in (*names, *names):
        kind, results = CALLS[name], []
        for model in (theirs, ours):
            model.train(kind.get("training", True))
            model.zero_grad()
            output = model(**arguments(**kind))
            loss = output.loss if output.loss is not None else output.logits.square().mean()
            loss.backward()
            results.append(output)
        expected, found = results
        same(found.logits.detach(), expected.logits.detach(), name)
        if expected.loss is not None:
            same(found.loss.detach(), expected.loss.detach(), name)
        if kind.get("cache"):
            same(found.past_key_values.layers[0].keys.detach(), expected.past_key_values.layers[0].keys.detach(), name)
        same_gradients(ours, theirs, name)
        with torch.no_grad():
            same(ours(**arguments(**kind)).logits, expected.logits.detach(), f"{name} without gradients")
    assert len(ours._programs) == len(names)  # each made once: the second round found them all


EVERY, SOME = tuple(CALLS), ("planned", "fewer rows", "evaluation", "a mask")


@pytest.mark.parametrize(("search", "sizes", "names"), [("fsdp", (4,), EVERY), ("megatron", (2, 2), SOME)])
def test_calls_of_one_module(pool, search, sizes, names):
    pool.run(calls, search, sizes, names, seconds=280)


def test_calls_of_stages(pair):
    pair.run(calls, "1f1b", TWO, EVERY, seconds=280)


@all_double()
def accumulates(rank: int, search: str) -> None:
    """Passes of unlike shapes under one no_sync: the sum of all gradients is there after the last one."""
    ours = parallelize(gpt2(), strategy_of(search, TWO), mesh=device_mesh(TWO), graph=graph_of(), keep=True)
    theirs = copy.deepcopy(gpt2())
    shapes = [(ROWS, LENGTH), (7, 9), (ROWS, LENGTH), (7, 9)]
    for rows, length in shapes:
        theirs(**arguments(rows, length)).loss.backward()
    with ours.no_sync():
        for rows, length in shapes[:-1]:
            ours(**arguments(rows, length)).loss.backward()
    assert all(parameter.grad is None for parameter in ours.parameters())
    ours(**arguments(*shapes[-1])).loss.backward()
    same_gradients(ours, theirs, "accumulated")
    both = ours(**arguments(ROWS, LENGTH)).loss + ours(**arguments(7, 9)).loss
    both.backward()  # the first of two forward passes goes back after another program ran
    (theirs(**arguments(ROWS, LENGTH)).loss + theirs(**arguments(7, 9)).loss).backward()
    same_gradients(ours, theirs, "added up")


@pytest.mark.parametrize("search", ["fsdp", "data-parallel"])
def test_accumulation_over_unlike_shapes(pair, search):
    pair.run(accumulates, search, seconds=200)


@all_double()
def bounded(rank: int) -> None:
    from shardwright.runtime import programs

    before, programs.LIMIT = programs.LIMIT, 2
    try:
        ours = parallelize(gpt2(), strategy_of("fsdp", TWO), mesh=device_mesh(TWO), graph=graph_of(), keep=True)
        for length in (12, 4, 5, 6, 12):
            ours(**arguments(ROWS, length)).loss.backward()
        assert len(ours._programs) == 3
        with pytest.raises(RunError, match="It has no program of its own"):
            ours(input_ids=tokens(ROWS, LENGTH).float())
    finally:
        programs.LIMIT = before


def test_programs_are_bounded(pair):
    pair.run(bounded, seconds=200)


def test_splits_are_carried_over():
    graph, strategy = graph_of(), strategy_of("fsdp")
    with all_double():
        other = capture(gpt2(), (), arguments(ROWS, LENGTH, mask=True))
    same_ones = matched_operators(graph, other)
    found = carried(graph, strategy, other)
    assert len(same_ones) > 0.9 * len(graph.ops)
    for op in other.ops:
        if op.name in same_ones and op.module.startswith("transformer.h"):
            assert found.splits[op.name] == strategy.splits[same_ones[op.name].name], op
    new = [op for op in other.ops if op.name not in same_ones]
    assert new and all(op.name in found.splits for op in new)
    assert {name: layout for name, layout in found.resting.items() if name in graph.parameter_of} == {
        name: layout for name, layout in strategy.resting.items() if name in graph.parameter_of
    }
    assert carried(graph, strategy, graph).splits == strategy.splits  # the planned call itself stays as it is


@all_double()
def meets_expected(rank: int, text: str) -> None:
    """Calls that the plan knows are captured once each, however they are written, and are what the plan says."""
    from runtime.test_expected_calls import heard
    from shardwright.runtime.template import Template

    ours, theirs = parallelize(gpt2(), from_json(text), keep=True), copy.deepcopy(gpt2())
    captured, count = Template.captured, []
    try:
        Template.captured = lambda *given: count.append(1) or captured(*given)  # type: ignore[method-assign]
        with heard() as warnings:
            for training, call in ((True, arguments(4, 9)), (False, {"input_ids": tokens(2, 6)})):
                expected, found = (model.train(training)(**call) for model in (theirs, ours))
                same(found.logits.detach(), expected.logits.detach(), "expected")
            same(ours(tokens(2, 6)).logits.detach(), expected.logits.detach(), "by position")
    finally:
        Template.captured = captured  # type: ignore[method-assign]
    assert len(ours._programs) == 3 and len(count) == 2 and not warnings


def test_known_calls_are_those_of_the_plan(pool):
    calls = [((), arguments(4, 9)), ((), {"input_ids": tokens(2, 6)}, False)]
    options: dict[str, Any] = {"cluster": "4xH100", "search": "fsdp", "baselines": (), "fewer_devices": False}
    with all_double():
        plan = shardwright.plan(gpt2(), (), arguments(ROWS, LENGTH), also=calls, **options)
    assert gpt2().training and sum(note.startswith("also input_ids") for note in plan.notes) == 2
    pool.run(meets_expected, to_json(plan), seconds=200)
    with pytest.raises(Infeasible, match=r"input_ids \[4, 9\]"):
        with_calls(plan, plan.other_graphs(), limit=1e6)
