"""What is replaced in the whole process has one owner: one thread at a time, for that thread alone, undone in any case."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import pytest
import torch
from torch._functorch import apis
from torch._subclasses.fake_tensor import FakeTensor

import shardwright
from shardwright._torch_compat import fake_tolist, replaced_vmap
from shardwright.frontend import capture
from shardwright.frontend.checks import skipped_checks
from shardwright.frontend.guards import as_in_eager_mode, whole_functions
from shardwright.frontend.randomness import inert_randomness
from shardwright.process_wide import replaced
from shardwright.runtime.materialise import parameters_on_meta

OWNERS = (
    (torch, "rand"),
    (random, "uniform"),
    (random, "random"),
    (torch.autograd.Function, "apply"),
    (torch.compiler, "is_exporting"),
    (torch.SymBool, "__bool__"),
    (torch.nn.Module, "register_parameter"),
    (apis, "vmap_impl"),
    (FakeTensor, "tolist"),
)


def state() -> list[Any]:
    return [getattr_static(owner, name) for owner, name in OWNERS]


@pytest.mark.parametrize(
    "change",
    [
        inert_randomness,
        whole_functions,
        lambda: as_in_eager_mode(False),
        skipped_checks,
        parameters_on_meta,
        lambda: replaced_vmap(lambda *call: None),
        lambda: fake_tolist(lambda real, x: real(x)),
    ],
)
def test_everything_is_put_back_when_the_body_fails(change: Callable[[], Any]) -> None:
    before = state()
    with pytest.raises(KeyError), change():
        assert state() != before
        raise KeyError
    assert state() == before


def test_other_threads_call_what_was_there_before_and_wait_for_their_turn() -> None:
    seen: list[float] = []

    def look() -> None:
        seen.append(math.sqrt(4))

    def change() -> None:
        with replaced(math, "sqrt", lambda real: lambda x: 7.0):
            seen.append(math.sqrt(4))

    with replaced(math, "sqrt", lambda real: lambda x: -real(x)):
        assert math.sqrt(4) == -2
        looking, changing = threading.Thread(target=look), threading.Thread(target=change)
        looking.start()
        looking.join()
        changing.start()
        changing.join(0.05)
        assert changing.is_alive()
        assert math.sqrt(4) == -2
    changing.join()
    assert seen == [2.0, 7.0] and math.sqrt(4) == 2


class Meeting(torch.nn.Module):
    """A model whose forward, while it is being captured, gives a second capture the time to begin."""

    def __init__(self, arrived: threading.Event, other: threading.Event) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.arrived, self.other = arrived, other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.arrived.set()
        self.other.wait(0.3)
        return self.inner(x).square().mean()


def test_two_threads_plan_and_the_process_can_go_on_planning() -> None:
    before = state()
    events = [threading.Event(), threading.Event()]
    plans: dict[int, Any] = {}

    def work(number: int) -> None:
        model = Meeting(events[number], events[1 - number])
        try:
            plans[number] = shardwright.plan(model, (torch.zeros(8, 8),), cluster="2xH100", baselines=())
        except BaseException as problem:
            plans[number] = problem

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(plan, shardwright.Plan) for plan in plans.values()), plans
    assert plans[0].signature.fingerprint == plans[1].signature.fingerprint
    assert state() == before
    assert capture(torch.nn.Linear(8, 4), (torch.zeros(2, 8),)).ops
