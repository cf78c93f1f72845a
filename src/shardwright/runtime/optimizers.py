"""Fused optimizers on the local shards: one call of the kernel, without DTensor's dispatch of every tensor in it.

A fused update (``torch.optim.AdamW(fused=True)``) is one operator over lists of parameters, gradients and states. DTensor
looks at each tensor of each list, every step: 22 of 51 ms of a GPT-2's step on an H200's host. The update is element by
element, so where all lists lie alike (same mesh, same placements, which is how states and gradients of our parameters are
made) it is the same on the local tensors. Anything else goes the usual way. ``GradScaler`` asks all ranks whether a gradient
overflows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import dtensor_handlers, local_of, locals_of
from shardwright.operators.record import records
from shardwright.runtime.shards import distributed
from shardwright.runtime.whole_updates import know_whole_updates

_COMPARED: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[bool, Any, Any]] = {}
"""Lists of layouts that were compared before, by where they are; they are kept, so that nothing else comes to be there."""


def update_locally() -> None:
    """From now on fused updates of DTensors are computed on their local tensors, and those that need whole matrices on
    whole ones. Called again, nothing happens."""
    handlers = dtensor_handlers()
    for target in (target for target, known in records().items() if known.updates_lists):
        packet = getattr(torch.ops.aten, target.removeprefix("aten."), None)
        for overload in () if packet is None else packet.overloads():
            handlers.setdefault(getattr(packet, overload), _updated)
    handlers[torch.ops.aten.view_as_real.default] = _as_pairs
    handlers[torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscaled
    know_whole_updates()


def _as_pairs(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Complex numbers as pairs, where they lie: optimizers update them so. PyTorch's own handler gathers what is cut along
    the last dim, and the update of the copy would be lost (torch 2.13)."""
    (given,) = args
    shape, place = (*given.shape, 2), getattr(given, "place", None)
    return distributed(operator(local_of(given)), given.device_mesh, given.placements, shape, place)


def _unscaled(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gradients divided by ``GradScaler``'s scale, and on every rank whether any of them, on any rank, is not finite.

    PyTorch's own handler asks the other ranks along the axes that cut the first gradient: where that one lies whole and
    another is cut, a rank alone would skip its step.
    """
    gradients, found, scale = args
    operator([local_of(gradient) for gradient in gradients], local_of(found), local_of(scale), **kwargs)
    for mesh in {gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)}:
        for axis in range(mesh.ndim):
            dist.all_reduce(local_of(found), dist.ReduceOp.MAX, group=mesh.get_group(axis))


def _updated(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], torch.Tensor)]
    if _alike(lists):
        here = [locals_of(arg) if isinstance(arg, list | tuple) else local_of(arg) for arg in args]
        return operator(*here, **{name: local_of(value) for name, value in kwargs.items()})
    handlers = dtensor_handlers()
    mine = handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = mine


def _alike(lists: list[Any]) -> bool:
    """Whether the tensors that are updated together lie alike; counts of steps are plain tensors."""
    first, *others = ([getattr(x, "_spec", None) for x in tensors] for tensors in lists or [[None]])
    return None not in first and all(other[0] is None or _same(first, other) for other in others)


def _same(ones: list[Any], others: list[Any]) -> bool:
    key = tuple(map(id, ones)), tuple(map(id, others))
    if key not in _COMPARED:
        alike = len(ones) == len(others) and all(
            one is other or (other is not None and _lies(one) == _lies(other))
            for one, other in zip(ones, others, strict=True)
        )
        if len(_COMPARED) > 1_000:
            _COMPARED.clear()
        _COMPARED[key] = alike, ones, others
    return _COMPARED[key][0]


def _lies(spec: Any) -> tuple[Any, ...]:
    return spec.placements, spec.mesh, spec.shape
