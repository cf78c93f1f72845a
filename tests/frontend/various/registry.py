"""The models by name; each is defined beside its kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, Callable[[], Built]] = {}
ROWS = 4


def build(name: str) -> Built:
    """The model of that name with its inputs, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def named(make: Callable[[], Built]) -> Callable[[], Built]:
    MODELS[make.__name__] = make
    return make
