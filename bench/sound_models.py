"""Correct models: ``verify`` with its defaults must find nothing wrong with any of them (see :mod:`mutations`).

Those of the tests (images, sequences, relations, odd trainings), the models that show faults, and small
ones with dropout, of the zoo and with checkpointed blocks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from planting import Block, deep, forgetting, perceptron, pictures, words
from shardwright.zoo.reference import resolve

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.frontend.various import MODELS as VARIOUS
from tests.frontend.various import build as various

ZOO = (
    "gpt:small,dropout=0.1",
    "bert:small,dropout=0.1",
    "transformer:small,dropout=0.1",
    "rnnlm:small,dropout=0.2",
    "alexnet:small,dropout=0.5",
    "llama:small",
    "wresnet50:small",
    "hf:gpt2:small",
)


class Checkpointed(nn.Module):
    """Blocks with dropout that PyTorch computes again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 3), reentrant
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.last(x), y)


class Attentive(nn.Module):
    """A decoder's block, checkpointed: fused attention with dropout inside, a mask, tied table and head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.norm = nn.Embedding(17, 8), nn.Linear(8, 24, bias=False), nn.LayerNorm(8)

    def block(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        allowed = keep[:, None, :] & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return x + F.dropout(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=0.2), 0.1)

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x = checkpoint(self.block, self.table(tokens), keep, use_reentrant=False)
        return F.cross_entropy((x @ self.table.weight.T)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def checkpointed() -> Any:
    return Checkpointed(False), (torch.randn(8, 8), torch.randint(3, (8,))), {}


def checkpointed_reentrant() -> Any:
    return Checkpointed(True), (torch.randn(8, 8), torch.randint(3, (8,))), {}


def attentive() -> Any:
    keep = torch.ones(4, 6, dtype=torch.bool)
    keep[1, 4:], keep[3, 2:] = False, False
    return Attentive(), (torch.randint(17, (4, 6)), keep), {}


def of_zoo(reference: str) -> Any:
    found = resolve(reference, device="cpu")
    return found.model, found.args, found.kwargs


SOUND: Mapping[str, Callable[[], Any]] = {
    **{f"various: {name}": functools.partial(various, name) for name in VARIOUS},
    **{
        model.__name__: model
        for model in (words, pictures, perceptron, forgetting, deep, checkpointed, checkpointed_reentrant, attentive)
    },
    **{f"zoo: {reference}": functools.partial(of_zoo, reference) for reference in ZOO},
}
