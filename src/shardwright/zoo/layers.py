"""The layers several zoo models share: embeddings, attention, feed-forward networks, the language-model loss.

Everything that owns a parameter or a buffer has ``reset_parameters``, so a model built on the meta device can be given
memory and initial values one module at a time: ``module.to_empty(device="cpu", recurse=False)``, then
``module.reset_parameters()``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import ModelError


class Embedding(nn.Embedding):
    """A table of vectors with small initial values, so that a head tied to it starts with small logits."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., 2021): pairs of features turn by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, positions: int, head_width: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("cos", torch.empty(positions, head_width), persistent=False)
        self.register_buffer("sin", torch.empty(positions, head_width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        positions, head_width = self.cos.shape
        device = self.cos.device
        frequency = self.base ** (-torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width)
        angle = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequency).repeat(1, 2)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """The rotation of the first ``length`` positions, for :func:`rotate`."""
        return self.cos[:length], self.sin[:length]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn ``x`` (batch, heads, positions, head width) by the cosines and sines of :class:`Rotary`."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Multi-head attention; ``kv_heads < heads`` is grouped-query attention (Ainslie et al., 2023)."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_width: int | None = None,
        bias: bool = True,
        causal: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if head_width is None and width % heads:
            raise ModelError(f"A width of {width} cannot be shared by {heads} heads.", "Make it a multiple of them.")
        if kv_heads is not None and heads % kv_heads:
            raise ModelError(f"{heads} heads cannot share {kv_heads} key-value heads.", "Make kv_heads a divisor.")
        self.head_width = head_width or width // heads
        self.causal = causal
        self.dropout = dropout
        self.grouped = kv_heads is not None and kv_heads != heads
        kv_width = (kv_heads or heads) * self.head_width
        self.query = nn.Linear(width, heads * self.head_width, bias=bias)
        self.key = nn.Linear(width, kv_width, bias=bias)
        self.value = nn.Linear(width, kv_width, bias=bias)
        self.output = nn.Linear(heads * self.head_width, width, bias=bias)

    def forward(self, x: Tensor, memory: Tensor | None = None, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend from ``x`` to ``memory`` (to itself when there is none); both (batch, positions, width)."""
        source = x if memory is None else memory
        query, key, value = self._heads(self.query(x)), self._heads(self.key(source)), self._heads(self.value(source))
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.causal, enable_gqa=self.grouped
        )
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int, inner: int, activation: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.up(x))))


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): one linear layer gates another."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of (batch, positions, vocabulary) against (batch, positions); targets of -100 do not count."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_tokens(vocabulary: int, *shape: int) -> Tensor:
    """Valid token numbers on the ambient device."""
    return torch.randint(0, vocabulary, shape)
