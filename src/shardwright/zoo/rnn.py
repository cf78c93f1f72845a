"""An unrolled multi-layer recurrent network of LSTM cells written out as matrix products: Tofu's RNN-L-H.

Unrolling gives ``seq`` x ``layers`` copies of one small subgraph that share their weights: the case in which
operators must be grouped before a search over them is possible. Tofu unrolls 20 steps with batch 512, 6 to 10 layers
of 4K to 8K units; it does not print its vocabulary, ours is the 10,000 words of the Penn Treebank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.zoo.layers import Embedding, random_tokens, token_loss


class Cell(nn.Module):
    """One LSTM cell (Hochreiter and Schmidhuber, 1997): four gates from the input and the last hidden state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.from_input = nn.Parameter(torch.empty(width, 4 * width))
        self.from_hidden = nn.Parameter(torch.empty(width, 4 * width))
        self.bias = nn.Parameter(torch.empty(4 * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1.0 / math.sqrt(self.from_input.shape[0])
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        gates = x @ self.from_input + hidden @ self.from_hidden + self.bias
        admit, forget, candidate, emit = gates.chunk(4, dim=-1)
        memory = torch.sigmoid(forget) * memory + torch.sigmoid(admit) * torch.tanh(candidate)
        return torch.sigmoid(emit) * torch.tanh(memory), memory


class UnrolledRNN(nn.Module):
    def __init__(self, layers: int, width: int, vocab: int, dropout: float) -> None:
        super().__init__()
        self.tokens = Embedding(vocab, width)
        self.cells = nn.ModuleList(Cell(width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        inputs = self.tokens(tokens)
        start = inputs.new_zeros(inputs.shape[0], inputs.shape[2])
        hidden, memory = [start] * len(self.cells), [start] * len(self.cells)
        outputs = []
        for x in inputs.unbind(dim=1):
            for layer, cell in enumerate(self.cells):
                hidden[layer], memory[layer] = cell(x, hidden[layer], memory[layer])
                x = self.dropout(hidden[layer])
            outputs.append(x)
        return token_loss(self.head(torch.stack(outputs, dim=1)), targets)


MOST_CELLS = 10_000
"""Each is a dozen operators of the graph."""


def build(
    *,
    batch: int,
    seq: int,
    layers: int,
    width: int,
    vocab: int,
    dropout: float,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if layers * seq > MOST_CELLS:
        raise ModelError(
            f"rnn: {layers} layers over {seq} steps are {layers * seq:,} cells.", f"Ask for at most {MOST_CELLS:,}."
        )
    model = UnrolledRNN(layers, width, vocab, dropout)
    return model, (random_tokens(vocab, batch, seq), random_tokens(vocab, batch, seq)), {}
