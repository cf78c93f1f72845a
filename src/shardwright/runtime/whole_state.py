"""Whole weights from the shards of all ranks, whichever stages these have: for files that others read.

``state_dict()`` of a parallelized module has what this rank holds. Here every entry is put together on the ranks that hold
parts of it and told to those that hold none; every rank takes part, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.shards import whole


class _Told(NamedTuple):
    """What a rank says of an entry: what it is like, of which entry it is another name, or the plain value that it is."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    alias: str
    plain: Any


def whole_state(own: Mapping[str, Any], everywhere: bool = True) -> dict[str, Any]:
    """The entries of all ranks by their names, tensors whole and on the host; every rank calls this with its own entries and
    has them all, or, unless ``everywhere``, rank 0 does and the others nothing.

    Examples
    --------
    >>> torch.save(whole_state(model.state_dict()), "model.pt")                                  # doctest: +SKIP
    """
    first: dict[int, str] = {}
    mine = {name: _told(name, x, first) for name, x in own.items()}
    every: list[dict[str, _Told]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(every):
        for name in names:
            holders.setdefault(name, []).append(rank)
    found: dict[str, Any] = {}
    keeps = everywhere or dist.get_rank() == 0
    for name, ranks in holders.items():
        told = every[ranks[0]][name]
        if told.alias:
            value = found.get(told.alias)
        elif told.shape is None:
            value = told.plain
        else:
            value = _whole(own.get(name), told, ranks)
            value = value.cpu() if keeps else None
        if keeps:
            found[name] = value
    return found


def _told(name: str, value: Any, first: dict[int, str]) -> _Told:
    if not isinstance(value, Tensor):
        return _Told(None, None, "", value)
    alias = first.setdefault(id(value), name)
    return _Told(tuple(value.shape), value.dtype, "" if alias == name else alias, None)


def _whole(own: Tensor | None, told: _Told, ranks: list[int]) -> Tensor:
    found = None if own is None else whole(own.detach())
    if len(ranks) == dist.get_world_size():
        assert found is not None
        return found
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    if found is None:
        assert told.shape is not None
        found = torch.empty(told.shape, dtype=told.dtype, device=device)
    found = found.to(device).contiguous()
    dist.broadcast(found, ranks[0])
    return found
