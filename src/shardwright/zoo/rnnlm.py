"""RNNLM: a language model of two LSTM layers with a large vocabulary (Jozefowicz et al., 2016).

The sizes are those of PaSE: 2048 units, 50,000 words, batch 64. ``nn.LSTM`` is captured as one operator over layers,
positions, batch and units, which is also how PaSE sees it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwright.zoo.layers import Embedding, random_tokens, token_loss


class RNNLM(nn.Module):
    def __init__(self, layers: int, width: int, vocab: int, dropout: float) -> None:
        super().__init__()
        self.tokens = Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.tokens(tokens))
        return token_loss(self.head(hidden), targets)


def build(
    *,
    batch: int,
    seq: int,
    layers: int,
    width: int,
    vocab: int,
    dropout: float,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = RNNLM(layers, width, vocab, dropout)
    return model, (random_tokens(vocab, batch, seq), random_tokens(vocab, batch, seq)), {}
