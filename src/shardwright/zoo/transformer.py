"""The encoder-decoder Transformer (Vaswani et al., 2017), with the norm before each sublayer.

The sizes are those of PaSE's computation graph: 6 + 6 layers of width 1024, 16 heads of 128, inner width 8192, 50,000
words, 512 positions, batch 64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.zoo.layers import Attention, Embedding, FeedForward, random_tokens, token_loss


class Sinusoid(nn.Module):
    """Fixed position embedding: sines and cosines of geometrically growing wavelengths."""

    table: Tensor

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(positions, width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        positions, width = self.table.shape
        device = self.table.device
        frequency = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000.0) / width))
        angle = torch.outer(torch.arange(positions, device=device).float(), frequency)
        self.table.copy_(torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, head_width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, head_width=head_width, dropout=dropout)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = FeedForward(width, inner, nn.ReLU(), dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, head_width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, head_width=head_width, causal=True, dropout=dropout)
        self.cross_norm = nn.LayerNorm(width)
        self.cross = Attention(width, heads, head_width=head_width, dropout=dropout)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = FeedForward(width, inner, nn.ReLU(), dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.cross(self.cross_norm(x), memory))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class Transformer(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, head_width: int, inner: int, vocab: int, seq: int, dropout: float
    ) -> None:
        super().__init__()
        sizes = (width, heads, head_width, inner, dropout)
        self.source_tokens = Embedding(vocab, width)
        self.target_tokens = Embedding(vocab, width)
        self.positions = Sinusoid(seq, width)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, source: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        memory = self.dropout(self.positions(self.source_tokens(source)))
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoder_norm(memory)
        x = self.dropout(self.positions(self.target_tokens(tokens)))
        for layer in self.decoder:
            x = layer(x, memory)
        return token_loss(self.head(self.decoder_norm(x)), targets)


def build(
    *,
    batch: int,
    seq: int,
    layers: int,
    width: int,
    heads: int,
    head_width: int,
    inner: int,
    vocab: int,
    dropout: float,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = Transformer(layers, width, heads, head_width, inner, vocab, seq, dropout)
    source, tokens, targets = (random_tokens(vocab, batch, seq) for _ in range(3))
    return model, (source, tokens, targets), {}
