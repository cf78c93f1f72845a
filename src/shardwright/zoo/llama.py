"""A Llama-style decoder: RMS norm, rotary positions, grouped-query attention, SwiGLU (Touvron et al., 2023).

Defaults are Llama 3 8B, 8,030,261,248 parameters; Llama 2 70B is
``layers=80,width=8192,heads=64,kv_heads=8,inner=28672,vocab=32000``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwright.zoo.layers import Attention, Embedding, GatedFeedForward, Rotary, random_tokens, token_loss


class Block(nn.Module):
    """Attention and a feed-forward network, each behind an RMS norm and beside a residual connection."""

    def __init__(self, width: int, heads: int, kv_heads: int, feed: nn.Module, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, kv_heads=kv_heads, bias=False, causal=True, dropout=dropout)
        self.feed_norm = nn.RMSNorm(width, eps=1e-5)
        self.feed = feed

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation=rotation)
        return x + self.feed(self.feed_norm(x))


class Llama(nn.Module):
    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        inner: int,
        vocab: int,
        positions: int,
        rope_base: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = Embedding(vocab, width)
        self.rotary = Rotary(positions, width // heads, rope_base)
        self.blocks = nn.ModuleList(
            Block(width, heads, kv_heads, GatedFeedForward(width, inner), dropout) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        rotation = self.rotary(tokens.shape[1])
        for block in self.blocks:
            x = block(x, rotation)
        return token_loss(self.head(self.norm(x)), targets)


def build(
    *,
    batch: int,
    seq: int,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    inner: int,
    vocab: int,
    rope_base: float,
    dropout: float,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = Llama(layers, width, heads, kv_heads, inner, vocab, seq, rope_base, dropout)
    return model, (random_tokens(vocab, batch, seq), random_tokens(vocab, batch, seq)), {}
