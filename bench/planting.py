"""Planting a fault into running ranks: the models that show faults, and how a function is replaced by a wrong one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import known, record, records


class Words(nn.Module):
    """A table of 11 rows that is also the head, a layer norm, attention by hand and by one operator, labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.mix = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.table(tokens))
        x = x + ((x @ x.transpose(1, 2)).softmax(-1) @ self.mix(x))
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        logits = x @ self.table.weight.T
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Pictures(nn.Module):
    """Two convolutions with halos around a batch norm whose statistics are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4, momentum=0.3),
            nn.Conv2d(4, 2, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))).square().mean()


class Perceptron(nn.Module):
    """Three layers, the last two of them one and the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(torch.tanh(self.second(x))))).square().mean()


class Forgetting(nn.Module):
    """A layer before and after a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x), 0.4)).square().mean()


class Block(nn.Module):
    """A residual block that drops a third of what it adds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.3)


class Deep(nn.Module):
    """Two such blocks, for recomputation and for stages; labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.last(x), y)


def words() -> Any:
    return Words(), (torch.randint(11, (8, 5)), torch.randint(11, (8, 5))), {}


def pictures() -> Any:
    return Pictures(), (torch.randn(8, 3, 9, 8),), {}


def perceptron() -> Any:
    return Perceptron(), (torch.randn(8, 5),), {}


def forgetting() -> Any:
    return Forgetting(), (torch.randn(16, 8),), {}


def deep() -> Any:
    return Deep(), (torch.randn(8, 8), torch.randint(3, (8,))), {}


Patch = Callable[[ExitStack], None]


@dataclass(frozen=True)
class Mutation:
    """A fault, the model that shows it, how it is planted, and on how few processes it can be seen."""

    name: str
    model: Callable[[], Any]
    plant: Patch
    processes: int = 2


MUTATIONS: dict[str, Mutation] = {}


def mutation(name: str, model: Callable[[], Any], processes: int = 2) -> Callable[[Patch], Patch]:
    def register(plant: Patch) -> Patch:
        MUTATIONS[name] = Mutation(name, model, plant, processes)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The fault is there inside (no fault for an empty name)."""
    with ExitStack() as stack:
        if name:
            MUTATIONS[name].plant(stack)
        yield


def around(stack: ExitStack, owner: Any, attribute: str, change: Callable[..., Any]) -> None:
    """Replace a function by ``change(original, *args)``; it must exist."""
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    stack.enter_context(mock.patch.object(owner, attribute, changed))


def in_kernel(stack: ExitStack, target: str, change: Callable[[Callable[[Call], Piece | None], Call], Any]) -> None:
    original = record(target).piece
    assert original is not None
    stack.enter_context(mock.patch.dict(records()))
    known(target, piece=functools.partial(change, original))


def last_rank() -> bool:
    return dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
