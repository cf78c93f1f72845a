"""The host's pace: a quiet core, a yardstick whose parts are known, operators timed among others."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.cluster import cases_dispatch, pace
from shardwright.cluster.cases_dispatch import Chain, Insert, dispatch_seconds
from shardwright.cluster.pace import BLOCKS, PARTS, Yardstick

CPU = torch.device("cpu")


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(model, x: torch.Tensor) -> tuple[float, float]:
    """In place of the host's seconds, which a busy machine makes what it likes: a second for every operator issued."""
    with Counted() as forward:
        out = model(x)
    with Counted() as backward:
        out.backward(x)
    return float(forward.names.total()), float(backward.names.total())


@pytest.fixture
def table(monkeypatch) -> dict[str, list[float]]:
    yardstick = Yardstick(CPU)
    monkeypatch.setattr(cases_dispatch, "passes", operators)
    return dispatch_seconds(yardstick, rounds=1, repeats=1)


def test_the_parts_of_the_yardstick_are_those_it_runs():
    block = pace._Block(8)
    with Counted() as counted:
        block(torch.ones(2, 4, 8)).sum()
    names, calls = counted.names, []
    for module in block.modules():
        module.register_forward_pre_hook(lambda *_: calls.append(1))
    block(torch.ones(2, 4, 8))
    assert names["addmm"] == PARTS["linear"] and names["native_layer_norm"] == PARTS["layer_norm"]
    assert names["relu"] == PARTS["relu"] and names["native_dropout"] + names["bernoulli_"] == PARTS["dropout"]
    attention = [name for name in names if "scaled_dot_product" in name]
    assert sum(names[name] for name in attention) == PARTS["scaled_dot_product_attention"]
    assert names["transpose"] == 4 and names["add"] == PARTS["add"]
    assert len(calls) == PARTS["module"]


def test_the_prices_of_the_parts_add_up_to_the_yardstick(table):
    for which in (0, 1):
        parts = BLOCKS * sum(times * table[name][which] for name, times in PARTS.items())
        assert parts == pytest.approx(table["yardstick"][which])
    assert set(table) == {*cases_dispatch.cases(CPU), "yardstick"} - {"joined"}
    assert all(seconds >= 0 for row in table.values() for seconds in row)


def test_an_operator_costs_what_it_adds_to_the_chain(table):
    """One multiplication issues one operator; the others cost as many times that as they issue operators."""
    x, weight, bias = (torch.ones(sizes, requires_grad=True) for sizes in ((2, 4, 8), (8, 8), (8,)))
    for name, apply in {
        "relu": lambda: torch.relu(x),
        "linear": lambda: F.linear(x, weight, bias),
        "matmul": lambda: x @ weight,
        "layer_norm": lambda: F.layer_norm(x, (8,), bias, bias),
        "dropout": lambda: F.dropout(x, 0.1),
        "softmax": lambda: torch.softmax(x, -1),
    }.items():
        with Counted() as counted:
            apply()
        assert table[name][0] == pytest.approx(table["mul"][0] * counted.names.total()), name
    assert table["view"][0] == pytest.approx(table["mul"][0]) and table["slice"][0] == table["view"][0]


def test_an_inserted_operator_makes_the_chain_longer(monkeypatch):
    """By what it runs, not by a clock: whatever is inserted stands behind every operator, forward and backward."""

    def slow(place: int, x: torch.Tensor) -> torch.Tensor:
        places.append(place)
        return x.neg().neg()

    places: list[int] = []
    counts = []
    for chain in (Chain(CPU), Chain(CPU, Insert(slow))):
        with Counted() as counted:
            chain(chain._x).sum().backward()
        counts.append(counted.names)
    operators = 4 * cases_dispatch.SECTIONS
    assert places == list(range(operators))
    assert counts[1] - counts[0] == Counter(neg=4 * operators) and not counts[0] - counts[1]
    timed = iter([(3.0, 2.0), (1.0, 2.0), (1.0, 9.0)])
    monkeypatch.setattr(cases_dispatch, "passes", lambda chain, x: next(timed))
    assert Chain(CPU).best() == (1.0, 2.0), "the fastest of a few"


def test_what_is_timed_beside_the_yardstick_keeps_its_seconds():
    found = Yardstick(CPU).beside(lambda: 0.5, 4)
    assert [taken for taken, _ in found] == [0.5] * 4
    assert all(stick > 0 for _, stick in found)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot tie a process to a core")
def test_the_process_is_tied_to_one_core_and_let_go_again():
    before = os.sched_getaffinity(0)
    with pace.on_quietest_core() as core:
        assert os.sched_getaffinity(0) == {core} <= before
    assert os.sched_getaffinity(0) == before
