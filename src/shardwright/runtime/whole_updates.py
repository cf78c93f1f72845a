"""Optimizers that look at a whole matrix: each parameter is put together for its update, and cut again.

AdamW, SGD and Lion treat every number by itself, so their updates on shards are those of one process. Muon orthogonalises a
matrix (in bfloat16, so that another order of sums shows), Adafactor averages rows and columns: their steps are taken on
whole tensors, parameter by parameter, on every rank alike. State of a parameter's shape rests cut as the parameter does, so
that memory holds one whole parameter at a time and checkpoints are the usual ones; smaller state (rows, columns, counts) is
the same on every rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.runtime.shards import cut_like, whole

_KNOWN = (("torch.optim", "Muon"), ("torch.optim", "Adafactor"), ("transformers.optimization", "Adafactor"))


def update_whole(optimizer: type[torch.optim.Optimizer]) -> None:
    """From now on optimizers of this class update parameters of parallelized modules whole. Called again, nothing happens.

    >>> shardwright.update_whole(Shampoo)                                                        # doctest: +SKIP
    """
    found: Any = optimizer.step
    if getattr(found, "updates_whole", False):
        return
    hooked = getattr(found, "hooked", False)  # PyTorch wraps a class's step when the first of its optimizers is made
    step = found.__wrapped__ if hooked else found

    @functools.wraps(step)
    def whole_step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        if not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            return step(self, closure) if closure is not None else step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _updated(self, step)
        return loss

    outer: Any = torch.optim.Optimizer.profile_hook_step(whole_step) if hooked else whole_step
    outer.updates_whole, outer.hooked = True, hooked
    optimizer.step = outer  # type: ignore[method-assign]


def know_whole_updates() -> None:
    """Do so for the optimizers that are known to need it, as far as their modules are imported."""
    for module, name in _KNOWN:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None:
            update_whole(found)


@torch.no_grad()
def _updated(optimizer: torch.optim.Optimizer, step: Any) -> None:
    """One parameter after the other, as if it were the only one; what they have in common stands in their group."""
    groups = optimizer.param_groups
    members = [list(group["params"]) for group in groups]
    try:
        for group, parameters in zip(groups, members, strict=True):
            for parameter in parameters:
                if parameter.grad is not None:
                    for other in groups:
                        other["params"] = []
                    with _put_together(optimizer, parameter) as whole:
                        group["params"] = [whole]
                        step(optimizer)
    finally:
        for group, parameters in zip(groups, members, strict=True):
            group["params"] = parameters


@contextmanager
def _put_together(optimizer: torch.optim.Optimizer, parameter: Any) -> Iterator[torch.Tensor]:
    """The parameter, its gradient and its state as whole tensors; afterwards they lie as they did, with what was written."""
    if not isinstance(parameter, DTensor):
        yield parameter
        return
    together = torch.nn.Parameter(whole(parameter).clone())
    together.grad = _whole(parameter.grad)
    state = optimizer.state.pop(parameter, {})
    optimizer.state[together] = {name: _whole(value) for name, value in state.items()}
    try:
        yield together
        parameter.to_local().copy_(cut_like(together, parameter).to_local())
    finally:
        made = optimizer.state.pop(together)
        optimizer.state[parameter] = {
            name: cut_like(x, parameter) if isinstance(x, torch.Tensor) and x.shape == together.shape and x.dim() else x
            for name, x in made.items()
        }


def _whole(value: Any) -> Any:
    return whole(value) if isinstance(value, DTensor) else value
