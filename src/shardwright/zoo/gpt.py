"""GPT: a decoder-only Transformer with learned positions and a head tied to the embedding (Radford et al., 2019).

Defaults are GPT-2 small, 124,439,808 parameters; ``layers=96,width=12288,heads=96,seq=2048`` is GPT-3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.zoo.layers import Attention, Embedding, FeedForward, random_tokens, token_loss


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True, dropout=dropout)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = FeedForward(width, inner, nn.GELU(approximate="tanh"))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class GPT(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, inner: int, vocab: int, positions: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = Embedding(vocab, width)
        self.positions = Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, inner, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.norm(x)), targets)


def build(
    *,
    batch: int,
    seq: int,
    layers: int,
    width: int,
    heads: int,
    inner: int | None,
    vocab: int,
    dropout: float,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = GPT(layers, width, heads, inner or 4 * width, vocab, seq, dropout)
    return model, (random_tokens(vocab, batch, seq), random_tokens(vocab, batch, seq)), {}
