"""The model without its weights: what is captured again when a call comes that differs from those known.

``parallelize`` takes the model over, so its modules, attributes and code are copied beforehand with tensors on meta in place
of parameters and buffers. For a capture they become CPU tensors that nobody touches (the operating system gives no memory
for those): plain tensors that the model holds as attributes keep their values, and PyTorch traces as it did at first.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright._torch_compat import map_tree
from shardwright.frontend import capture
from shardwright.graph import Graph

Modes = tuple[bool, ...]
"""Whether each module, in the order of ``named_modules``, is in training mode."""


@dataclass(frozen=True, eq=False)
class Template:
    """A model whose parameters and buffers have shapes and no values."""

    model: torch.nn.Module

    @staticmethod
    def of(model: torch.nn.Module, dtype: torch.dtype | None = None) -> Template | None:
        """The template of a model, in another precision if asked for; nothing where a model cannot be copied."""
        try:
            return Template(with_tensors(model, "meta", dtype))
        except Exception:  # whatever a user's attributes raise: calls as planned need no copy
            return None

    def captured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: Mapping[str, bool]) -> Graph:
        """The graph of another call, in these modes by module path."""
        model = with_tensors(self.model, "cpu")
        for path, module in model.named_modules(remove_duplicate=False):
            module.training = training.get(path, module.training)
        args, kwargs = map_tree(_empty, (tuple(args), dict(kwargs)))
        return capture(model, args, kwargs, look_at_data=False)


def with_tensors(model: torch.nn.Module, device: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """A copy with empty tensors on this device in place of its own, floating ones in ``dtype`` if given."""

    def made(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_like(tensor, device=device, dtype=wanted, requires_grad=False)
        return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty

    return copy.deepcopy(model, {id(held): made(held) for held in (*model.parameters(), *model.buffers())})


def _empty(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
