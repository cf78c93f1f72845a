"""BERT with both pre-training heads: masked words and next sentence (Devlin et al., 2018). Defaults are BERT-base.

The norm comes after each sublayer and the decoder of the masked-word head is tied to the embedding, as in the paper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.zoo.layers import Attention, Embedding, FeedForward, random_tokens, token_loss

NORM_EPSILON = 1e-12
IGNORED = -100


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout=dropout)
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.feed = FeedForward(width, inner, nn.GELU())
        self.feed_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feed_norm(x + self.dropout(self.feed(x)))


class BERT(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, inner: int, vocab: int, positions: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = Embedding(vocab, width)
        self.positions = Embedding(positions, width)
        self.segments = Embedding(2, width)
        self.embedding_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, inner, dropout) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=NORM_EPSILON))
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight = self.tokens.weight
        self.pooler = nn.Linear(width, width)
        self.next_sentence = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, segments: Tensor, targets: Tensor, follows: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places) + self.segments(segments)
        x = self.dropout(self.embedding_norm(x))
        for block in self.blocks:
            x = block(x)
        masked_words = token_loss(self.decoder(self.transform(x)), targets)
        summary = torch.tanh(self.pooler(x[:, 0]))
        return masked_words + F.cross_entropy(self.next_sentence(summary), follows)


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
    model = BERT(layers, width, heads, inner or 4 * width, vocab, seq, dropout)
    words = random_tokens(vocab, batch, seq)
    # The paper asks for 15 % of the words: every seventh here, so that each row has some whatever the seed.
    asked = torch.arange(seq) % 7 == 0
    targets = torch.where(asked, words, torch.full_like(words, IGNORED))
    segments = (torch.arange(seq) >= seq // 2).long().expand(batch, seq).contiguous()
    return model, (words, segments, targets, torch.randint(0, 2, (batch,))), {}
