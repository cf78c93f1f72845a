"""The local shards of parameters as autograd sees them: leaves that live from step to step.

A parameter that operators use as it rests needs no operator of its own to be read: its local shard, detached from the
DTensor but in the same memory, is a leaf of the autograd graph, and a hook takes the gradient as soon as all uses have
brought their shares (the way of DDP, Li et al., 2020). A backward pass that holds gradients back simply leaves them in the
leaf, where the next one adds to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright._torch_compat import local_of
from shardwright.runtime.gradients import Gradients, Slot


class Leaf:
    """One parameter's local shard; ``held`` is the place in its module where the parameter is looked up by ``key``."""

    def __init__(self, held: dict[str, torch.nn.Parameter], key: str) -> None:
        self._held, self._key = held, key
        self._local: Tensor | None = None
        self._leaf = torch.empty(0)
        self._slot: Slot | None = None

    def give(self, slot: Slot, gradients: Gradients, alone: bool) -> None:
        """From now on gradients go home from here; ``alone`` says that no reader brings a further share."""
        self._slot, self._gradients, self._alone = slot, gradients, alone

    def tensor(self) -> Tensor:
        """The shard as it is now: the same leaf, unless the parameter was replaced, frozen or thawed."""
        parameter = self._held[self._key]
        local = local_of(parameter)
        if self._slot is None:
            return local.detach() if local.requires_grad else local
        if local is not self._local or parameter.requires_grad != self._leaf.requires_grad:
            self._local, self._leaf = local, local.detach().requires_grad_(parameter.requires_grad)
            if parameter.requires_grad:
                self._leaf.register_post_accumulate_grad_hook(self._arrived)
        return self._leaf

    @property
    def holds_back(self) -> bool:
        """Whether a gradient of a pass under ``no_sync`` waits here."""
        return self._leaf.grad is not None

    def _arrived(self, leaf: Tensor) -> None:
        gradients = self._gradients
        if gradients.hold:
            return
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None and self._slot is not None
        gradients.expect_end()
        gradients.add(self._slot, gradient, (), self._alone)
