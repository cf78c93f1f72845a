"""A model on the meta device or on an accelerator is traced as if it were on the CPU, with fake tensors.

Models make small tensors in their forward (``torch.tensor([0, 1])``) that land on the CPU and do not mix with meta
tensors, and PyTorch traces some operators differently on other devices. Fake tensors on the CPU have shapes but no
memory and avoid both: nothing is materialised, and a model captured on meta has the same graph, and the same
fingerprint, as the real one.
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
    """``model`` and its inputs with fake CPU tensors in place of its own; a model on the CPU comes back as it is."""
    held = [*model.parameters(), *model.buffers()]
    if all(tensor.device.type == "cpu" for tensor in held):
        return model, args, dict(kwargs)
    mode = fake_mode()

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with mode:
            standing = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
        if isinstance(leaf, torch.nn.Parameter):
            return torch.nn.Parameter(standing, requires_grad=leaf.requires_grad)
        return standing.requires_grad_(leaf.requires_grad)

    # Plain attributes get a stand-in too: only one whose value is needed for the graph is refused, later.
    held += [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    # Copying with a memo replaces every reference to a tensor at once, also those in plain lists, and keeps ties tied.
    memo = {id(tensor): fake(tensor) for tensor in held}
    twin = copy.deepcopy(model, memo)
    return twin, map_tree(fake, args), map_tree(fake, dict(kwargs))
