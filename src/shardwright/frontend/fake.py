"""A model on the meta device is traced as if it were on the CPU, with fake tensors: nothing is materialised.

Models make small tensors in their forward (``torch.tensor([0, 1])``) that land on the CPU and do not mix with meta
tensors, and PyTorch traces some operators differently on meta. Standing in for the meta tensors with fake ones on the
CPU avoids both, so a model captured on meta has the same graph, and the same fingerprint, as the real one later.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from shardwright._torch_compat import fake_mode, map_tree


def stand_in(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """``model`` and its inputs with fake CPU tensors in place of meta ones; what is not on meta comes back as it is."""
    held = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in held):
        return model, args, dict(kwargs)
    mode = fake_mode()

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return leaf
        with mode:
            standing = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
        if isinstance(leaf, torch.nn.Parameter):
            return torch.nn.Parameter(standing, requires_grad=leaf.requires_grad)
        return standing.requires_grad_(leaf.requires_grad)

    # Copying with a memo replaces every reference to a tensor at once, also those in plain lists, and keeps ties tied.
    memo = {id(tensor): fake(tensor) for tensor in held}
    twin = copy.deepcopy(model, memo)
    return twin, map_tree(fake, args), map_tree(fake, dict(kwargs))
