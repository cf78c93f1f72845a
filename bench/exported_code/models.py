"""Language models as anybody writes them, in plain PyTorch or transformers: nothing here knows of any parallelism."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, HEADS, ROWS = 64, 4, 16
WIDTH, LENGTH = int(os.environ.get("MODEL_WIDTH", "32")), int(os.environ.get("MODEL_LENGTH", "8"))
"""Small in tests; a benchmark says more."""


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (one(x).view(shape).transpose(1, 2) for one in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(bias)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.Linear(4 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(functional.gelu(self.up(self.feed_norm(x))))


class Language(nn.Module):
    """``tied``: the head has the weight of the embedding, as in GPT-2."""

    def __init__(self, layers: int, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("places", torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Block(bias=tied) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build(tied: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    data = [torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    return Language(4, tied), (data[0], data[1])


def apart() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return build(tied=False)


def tied() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return build(tied=True)


def transformer(kind: str, **sizes: Any) -> tuple[nn.Module, tuple[()], dict[str, torch.Tensor]]:
    import transformers

    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, use_cache=False, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa").train()
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return model, (), {"input_ids": tokens, "labels": tokens}


def llama() -> tuple[nn.Module, tuple[()], dict[str, torch.Tensor]]:
    return transformer(
        "llama", hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=HEADS, num_key_value_heads=2,
        intermediate_size=2 * WIDTH,
    )  # fmt: skip


def gpt2() -> tuple[nn.Module, tuple[()], dict[str, torch.Tensor]]:
    return transformer(
        "gpt2", n_embd=WIDTH, n_layer=4, n_head=HEADS, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
