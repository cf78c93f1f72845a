"""PyTorch's own clipping of a pipeline: the norm of one process, whatever is held where, or a sentence."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, get_total_norm

from runtime.pipelines import halves, pipeline_plan
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.runtime import parallelize
from shardwright.runtime.clipping import clip_gradients
from shardwright.runtime.shards import whole

ORDERS = (2.0, 1.0, 3.0, 0.0, math.inf, -math.inf)


class Words(torch.nn.Module):
    """An embedding that is, or is not, the head too; layers between them; one without any use for its bias."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, 13, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def example(tied: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model, args = Words(tied).to(dtype), (torch.randint(13, (8, 3)), torch.randint(13, (8, 3)))
    return model, args, capture(model, args)


def by_hand(parameters: Any, order: float) -> torch.Tensor:
    """As older scripts write it."""
    return torch.norm(torch.stack([torch.norm(p.grad.detach(), order) for p in parameters]), order)


def clipped(rank: int, *plan: Any) -> None:
    compared(torch.float32, (2.0, 1.0, math.inf), 1e-6, *plan)
    compared(torch.float64, ORDERS, 1e-10, *plan)


def compared(
    dtype: torch.dtype,
    orders: Sequence[float],
    exact: float,
    tied: bool,
    stages: int,
    each: int | Sequence[int],
    seed: int | None,
) -> None:
    model, args, graph = example(tied, dtype)
    reference = copy.deepcopy(model)
    parallel = parallelize(model, pipeline_plan(graph, halves(graph, stages), 2, "1f1b", each, seed), args, graph=graph)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (parallel, reference)]
    for order in orders:
        for foreach in (None, True, False):
            norms = []
            for module, optimizer in zip((parallel, reference), optimizers, strict=True):
                optimizer.zero_grad()
                (10 * module(*args)).backward()
                gradients = [p.grad for p in module.parameters()]
                total = get_total_norm(gradients, order, foreach=foreach)
                norms.append([total, by_hand(module.parameters(), order)])
                norms[-1].append(get_total_norm([g / 2 for g in gradients], order, foreach=foreach))
                largest = 0.3 if order == 2.0 else 1e9
                norms[-1].append(clip_grad_norm_(module.parameters(), largest, order, foreach=foreach))
                assert all(type(x) is torch.Tensor and x.dtype == dtype for x in norms[-1])
                optimizer.step()
            torch.testing.assert_close(*norms, rtol=exact, atol=0, msg=lambda m, o=order, f=foreach: f"{o} {f}: {m}")
    assert type(pickle.loads(pickle.dumps(gradients[0].clone()))) is torch.Tensor
    weights = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in parallel.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(whole(parameter.detach()), weights[name].detach(), rtol=exact, atol=exact)
        copied = copy.deepcopy(parameter.grad)
        assert torch.equal(whole(copied), whole(parameter.grad))
        norm = weights[name].grad.norm()  # of one gradient it is that gradient's
        torch.testing.assert_close(float(parameter.grad.norm()), float(norm), rtol=exact, atol=exact)


@pytest.mark.parametrize("tied", [False, True])
def test_on_two_processes(pair, tied):
    pair.run(clipped, tied, 2, 1, None)


@pytest.mark.parametrize(
    ("tied", "stages", "each", "seed"),
    [(True, 4, 1, None), (False, 2, 2, 1), (True, 2, 2, 2), (True, 2, (3, 1), 1), (True, 2, (1, 3), 2)],
)
def test_on_four_processes(pool, tied, stages, each, seed):
    pool.run(clipped, tied, stages, each, seed)


def not_finite(rank: int) -> list[bool]:
    model, args, graph = example(True)
    parallel = parallelize(model, pipeline_plan(graph, halves(graph, 2), 2, "1f1b"), args, graph=graph)
    parallel(*args).backward()
    if rank == 1:
        parallel.layers[2].bias.grad.to_local()[0] = math.nan
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        clip_grad_norm_(parallel.parameters(), 1.0, error_if_nonfinite=True)
    return [bool(get_total_norm([p.grad for p in parallel.parameters()], order).isnan()) for order in (2.0, math.inf)]


def test_a_number_that_is_none_on_one_rank_is_everybodys(pair):
    assert pair.run(not_finite) == [[True, True]] * 2


class Frozen(torch.nn.Module):
    """Its first half trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 6).requires_grad_(False), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()).square().mean()


def idle(rank: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model, x = Frozen(), torch.randn(8, 6)
    graph, reference = capture(model, (x,)), copy.deepcopy(model)
    reference(x).backward()
    names = [op.name for op in graph.ops]
    cuts = [names[:1], names[1:]]
    parallel = parallelize(model, pipeline_plan(graph, cuts, 2, "1f1b"), (x,), graph=graph)
    parallel(x).backward()
    if rank == 1:
        with pytest.raises(RunError, match="rank 0 holds nothing that is trained") as caught:
            clip_grad_norm_(parallel.parameters(), 1.0)
        assert "clip_gradients" in caught.value.remedy
    wrapped = torch.nn.ModuleDict({"inside": parallel})
    return float(clip_gradients(wrapped, 1e-3)), float(clip_grad_norm_(reference.parameters(), 1e-3))


def test_a_rank_that_trains_nothing_would_not_take_part(pair):
    for found, expected in pair.run(idle):
        assert found == pytest.approx(expected, rel=1e-6)


def apart(rank: int) -> list[str]:
    """Each stage's parameters clipped by themselves: ranks on different lines, or a rank that goes on to its next call."""
    model, args, graph = example(False)
    parallel = parallelize(model, pipeline_plan(graph, halves(graph, 2), 2, "1f1b"), args, graph=graph)
    parallel(*args).backward()
    found = []
    with pytest.raises(RunError, match="The ranks make different calls") as caught:
        if rank == 0:
            clip_grad_norm_(parallel.embedding.parameters(), 1.0)
        else:
            clip_grad_norm_(parallel.head.parameters(), 1.0)
    found.append(caught.value.message)
    with pytest.raises(RunError, match="The ranks make different calls") as caught:
        if rank == 0:
            clip_grad_norm_(parallel.embedding.parameters(), 1.0)
        parallel(*args)
    return [*found, caught.value.message]


def test_ranks_that_take_different_norms_are_told(pair):
    for messages in pair.run(apart):
        assert "from another line" in messages[0]
        assert "rank 0 takes a norm (clips), rank 1 calls the model" in messages[1]
