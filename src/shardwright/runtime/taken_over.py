"""Parameters of a model that was split: optimizers made before go on with this rank's shards, other uses are refused.

``parallelize`` puts a shard in the place of every parameter, so whoever took the parameters before would hold tensors that
nothing computes with any more: an optimizer would train nothing, clipping clip nothing, without a word. Optimizers that
are alive are therefore given the shards, with the state they have; the old tensors let go of their memory and say what they
are when anybody uses them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.errors import RunError
from shardwright.runtime.shards import cut_like

_SUCCESSOR = "_shardwright_successor"


class TakenOver(torch.nn.Parameter):
    """What used to be a parameter of a model that has been split."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise RunError(
            "A parameter is used that parallelize() has taken over: the split model has this rank's shard in its place.",
            "Take parameters, and make optimizers, from what parallelize() returns: model = parallelize(model, plan); "
            "model.parameters(). To go on using the model as it was, call parallelize(..., keep=True).",
        )

    def __repr__(self) -> str:  # type: ignore[override]  # the keyword is for tensors with values
        return "a parameter that shardwright.parallelize() has taken over"


def take_over(old: torch.nn.Parameter, shard: Any) -> None:
    """``shard`` takes a parameter's place (``None``: other ranks hold it). Those on meta, which have nothing to give up, may
    be used again."""
    vars(old)[_SUCCESSOR] = shard
    if type(old) is torch.nn.Parameter and not old.is_meta:
        old.grad, old.data = None, old.data.new_empty(0)
        old.__class__ = TakenOver


def carry_over(parameters: Iterable[weakref.ref[Any]]) -> None:
    """Let living optimizers go on with the shards, where somebody still holds parameters that were taken over."""
    if not any(_SUCCESSOR in vars(held) for ref in parameters if (held := ref()) is not None):
        return
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):
            _carry_over(found)


def _carry_over(optimizer: torch.optim.Optimizer) -> None:
    for group in vars(optimizer).get("param_groups", ()):  # one that wraps another has none of its own
        held = group["params"]
        if not any(_SUCCESSOR in vars(p) for p in held):
            continue
        shards = [vars(p).get(_SUCCESSOR, p) for p in held]
        if "param_names" in group:
            group["param_names"] = [n for n, p in zip(group["param_names"], shards, strict=True) if p is not None]
        for old, shard in zip(held, shards, strict=True):
            if shard is not old:
                state = optimizer.state.pop(old, None)
                if shard is not None and state is not None:
                    optimizer.state[shard] = {name: _cut(value, shard) for name, value in state.items()}
        held[:] = [p for p in shards if p is not None]  # the list itself: some optimizers keep it under another name


def _cut(value: Any, shard: Any) -> Any:
    """State of a parameter's shape lies as its shard does, other state is the same on every rank."""
    if isinstance(value, Tensor) and isinstance(shard, DTensor) and value.shape == shard.shape and value.ndim:
        return cut_like(value, shard)
    return value
