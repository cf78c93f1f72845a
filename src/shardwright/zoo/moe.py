"""A mixture of experts in every layer, with capacity-based dense dispatch (GShard: Lepikhin et al., 2020).

Each token goes to its ``top_k`` experts; an expert takes at most ``capacity`` tokens of a sequence and drops the
rest, so every shape is static and the experts are one batched product. Tokens are handed out and collected by one-hot
tensors, and an auxiliary loss rewards an even load. Defaults are the sizes of Mixtral 8x7B (Jiang et al., 2024).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.zoo.layers import Embedding, Rotary, random_tokens, token_loss
from shardwright.zoo.llama import Block


class Experts(nn.Module):
    """SwiGLU networks side by side: one batched product per weight."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, width, inner))
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.parameters(recurse=False):
            bound = 1.0 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Apply expert e to ``x[:, e]``; ``x`` is (batch, experts, capacity, width)."""
        gated = F.silu(torch.einsum("becw,ewi->beci", x, self.gate)) * torch.einsum("becw,ewi->beci", x, self.up)
        return torch.einsum("beci,eiw->becw", gated, self.down)


class MixtureFeed(nn.Module):
    """Route, dispatch, compute, combine; returns the mixture and its load-balance loss."""

    def __init__(self, width: int, inner: int, experts: int, top_k: int, capacity_factor: float) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, inner)
        self.count = experts
        self.top_k = top_k
        self.capacity_factor = capacity_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, seq, _ = x.shape
        capacity = min(seq, math.ceil(self.top_k * seq / self.count * self.capacity_factor))
        shares = self.router(x).float().softmax(dim=-1)
        weights, chosen = shares.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        picks = (chosen.unsqueeze(-1) == torch.arange(self.count, device=x.device)).to(weights.dtype)
        # First choices queue before second choices, and earlier tokens before later ones.
        queue = picks.transpose(1, 2).reshape(batch, self.top_k * seq, self.count).cumsum(dim=1)
        place = (queue.reshape(batch, self.top_k, seq, self.count).transpose(1, 2) - 1) * picks
        slot = (place.sum(dim=-1, keepdim=True) == torch.arange(capacity, device=x.device)).to(weights.dtype)
        # A token whose place is beyond the capacity matches no slot: it is dropped.
        combine = torch.einsum("bsk,bske,bskc->bsec", weights, picks, slot)
        dispatch = torch.einsum("bske,bskc->bsec", picks, slot).to(x.dtype)
        taken = self.experts(torch.einsum("bsec,bsw->becw", dispatch, x))
        mixed = torch.einsum("bsec,becw->bsw", combine.to(x.dtype), taken)
        first = picks[:, :, 0].mean(dim=(0, 1))
        balance = self.count * (first * shares.mean(dim=(0, 1))).sum()
        return mixed, balance


class MixtureBlock(Block):
    """A Llama block whose feed-forward network also returns its load-balance loss."""

    def forward(  # type: ignore[override]  # one more output than its base
        self, x: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rotation=rotation)
        mixed, balance = self.feed(self.feed_norm(x))
        return x + mixed, balance


class MixtureOfExperts(nn.Module):
    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        inner: int,
        experts: int,
        top_k: int,
        capacity_factor: float,
        vocab: int,
        positions: int,
        balance_weight: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.balance_weight = balance_weight
        self.tokens = Embedding(vocab, width)
        self.rotary = Rotary(positions, width // heads, 1_000_000.0)
        self.blocks = nn.ModuleList(
            MixtureBlock(width, heads, kv_heads, MixtureFeed(width, inner, experts, top_k, capacity_factor), dropout)
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        rotation = self.rotary(tokens.shape[1])
        balances = []
        for block in self.blocks:
            x, balance = block(x, rotation)
            balances.append(balance)
        loss = token_loss(self.head(self.norm(x)), targets)
        return loss + self.balance_weight * torch.stack(balances).mean()


def build(
    *,
    batch: int,
    seq: int,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    inner: int,
    experts: int,
    top_k: int,
    capacity_factor: float,
    vocab: int,
    balance_weight: float,
    dropout: float,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = MixtureOfExperts(
        layers, width, heads, kv_heads, inner, experts, top_k, capacity_factor, vocab, seq, balance_weight, dropout
    )
    return model, (random_tokens(vocab, batch, seq), random_tokens(vocab, batch, seq)), {}
