"""What pipelines elsewhere are known to get wrong or to refuse, each by its name: here it gives the numbers of one process.

(``torch.distributed.pipelining`` 2.13: a tied embedding loses a share of its gradient, a skip over two stages is not
supported, seven rows in two micro-batches abort the process, compiled stages exclude a split backward.) All cases run in one
call of the pool; each test looks at its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional

from runtime.pipelines import pipeline_plan
from runtime.pool import POOL
from runtime.test_regions import uncompiled
from shardwright.frontend import capture
from shardwright.runtime import parallelize, regions
from shardwright.runtime.shards import whole
from shardwright.schedules import Schedule

WIDTH, WORDS = 6, 11


class Four(torch.nn.Module):
    """Four layers, one for each stage; what is odd about it is said by name."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.odd = odd
        self.first = torch.nn.Embedding(WORDS, WIDTH)
        self.second, self.third = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.fourth = torch.nn.Linear(WIDTH, WORDS, bias=False)
        if odd == "tied weights across stages":
            self.fourth.weight = self.first.weight
        if odd == "a stage with no trainable parameter":
            self.third.requires_grad_(False)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> Any:
        first = self.first(words)
        second = self.second(first).tanh()
        third = self.third(second).exp()
        if self.odd == "a skip over two stages":
            third = third * first
        loss = functional.cross_entropy(self.fourth(third), labels)
        return (loss, second) if self.odd == "an unused stage output" else loss


COMPILED = "zero-bubble with compiled stages"
COUNTS = {"fewer micro-batches than stages": 2, "unequal micro-batches": 3}
ORDERS = {
    COMPILED: "zb-h1",
    "last-stage forwards out of order": Schedule.parse(
        "0F0 0F1 0B0 0B1 | 1F0 1F1 1B0 1B1 | 2F0 2F1 2B0 2B1 | 3F1 3F0 3I0 3I1 3W1 3W0"
    ),
}
FAILURES = (
    "tied weights across stages",
    "a skip over two stages",
    "an unused stage output",
    "fewer micro-batches than stages",
    "unequal micro-batches",
    "a stage with no trainable parameter",
    "last-stage forwards out of order",
    COMPILED,
)


def stages(graph: Any) -> list[list[str]]:
    """A stage begins with every layer."""
    found: list[list[str]] = []
    for op in graph.ops:
        if op.module in ("first", "second", "third", "fourth") and len(found) < 4:
            found.append([])
        found[-1].append(op.name)
    assert len(found) == 4
    return found


def difference(odd: str) -> float:
    torch.manual_seed(0)
    rows = 7 if odd == "unequal micro-batches" else 8
    model, args = Four(odd).double(), (torch.randint(WORDS, (rows,)), torch.randint(WORDS, (rows,)))
    graph = capture(model, args)
    reference = copy.deepcopy(model)
    plan = pipeline_plan(graph, stages(graph), COUNTS.get(odd, 2), ORDERS.get(odd, "1f1b"))
    parallel = parallelize(model, plan, args, graph=graph)
    if odd == COMPILED:
        parallel.compile()
    worst = 0.0
    for _ in range(2):
        for module in (reference, parallel):
            module.zero_grad()
        (expected, found) = (one[0] if isinstance(one, tuple) else one for one in (reference(*args), parallel(*args)))
        expected.backward(), found.backward()
        worst = max(worst, (found - expected).abs().item())
        for name, parameter in parallel.named_parameters():
            wanted = reference.get_parameter(name).grad
            assert (parameter.grad is None) == (wanted is None), name
            if wanted is not None:
                worst = max(worst, (whole(parameter.grad) - wanted).abs().max().item())
    return worst


def differences(rank: int) -> dict[str, float]:
    before, regions.compiled_function = regions.compiled_function, uncompiled
    try:
        return {odd: difference(odd) for odd in FAILURES}
    finally:
        regions.compiled_function = before


@functools.cache
def everywhere() -> list[Mapping[str, float]]:
    return POOL.run(differences, seconds=240)


@pytest.mark.parametrize("odd", FAILURES)
def test_known_failure(odd: str) -> None:
    assert max(rank[odd] for rank in everywhere()) < 1e-12
