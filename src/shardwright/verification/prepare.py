"""A model made ready to be compared: dropout off, double precision everywhere if asked for.

Random numbers are drawn per shard, so dropout cannot agree with one device's pattern; its own tests cover it. Training
mode stays on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright._torch_compat import map_tree


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Set every rate whose name speaks of dropping to zero, in modules and in the configurations they carry."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
    return model


def widened(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its inputs in float64."""

    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return model.double(), map_tree(wide, tuple(args)), map_tree(wide, dict(kwargs))
