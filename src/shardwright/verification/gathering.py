"""What the ranks hold, brought to rank 0: every tensor whole, and how far the copies of it are from each other.

A plan keeps many tensors on several ranks, and a rank that forgets an update is wrong even where rank 0 is right. All ranks
tell each other which region of a tensor they hold and a digest of its bytes; the first holder of a region sends it, and
so does every rank whose digest differs from the first holder's. Copies that agree therefore cost nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import first_chunk_offsets


class Gathered(NamedTuple):
    """Tensors by name, and for every name how far two ranks' copies differ at most and which rank's differs so."""

    tensors: dict[Any, Tensor]
    spreads: dict[Any, tuple[float, int]]


def gathered(tensors: Mapping[Any, Tensor], together: bool, stages: bool = False) -> Gathered:
    """Copies, whole on rank 0 (other ranks get their own parts). ``together``: every rank calls this with its share.

    ``stages``: ranks hold the tensors of their own stages only, so that one without a tensor is nothing strange.
    """
    parts = {name: _local(tensor).detach().clone() for name, tensor in tensors.items()}
    if not together:
        return Gathered(parts, {})
    regions = {
        name: (_offsets(tensor), _digest(parts[name]), (tuple(tensor.shape), tensor.dtype))
        for name, tensor in tensors.items()
    }
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(known, regions)
    rank = dist.get_rank()
    mine = {name: parts[name] for name in parts if rank and _sends(known, name, rank)}
    sent: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, sent if rank == 0 else None)
    if rank:
        return Gathered(parts, {})
    sent[0] = parts
    names = dict.fromkeys(name for regions in known for name in regions)
    spreads = {name: _spread(known, sent, name, stages) for name in names}
    seen = names if stages else [name for name in names if name in tensors]
    return Gathered({name: _whole(known, sent, name) for name in seen}, spreads)


def distance(true: Tensor | None, other: Tensor | None) -> float:
    """The largest difference; infinite where one is missing, has another shape or is not finite where the other is. What
    holds no number is not missed (a layer of MobileBERT's head has no columns where its widths are equal)."""
    if not any(x is not None and x.numel() for x in (true, other)):
        return 0.0
    if true is None or other is None or true.shape != other.shape:
        return math.inf
    wide = torch.complex128 if true.is_complex() else torch.float64
    true, other = true.to(wide), other.to(wide)
    alike = (true == other) | (torch.isnan(true) & torch.isnan(other))
    return float(torch.where(alike, 0.0, (true - other).abs()).nan_to_num(math.inf, math.inf).max())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _offsets(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part begins; a tensor that is no DTensor is whole everywhere."""
    return first_chunk_offsets(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.dim()


def _digest(tensor: Tensor) -> tuple[tuple[int, ...], bytes]:
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return tuple(tensor.shape), hashlib.blake2b(data, digest_size=16).digest()


def _holder(known: list[Any], name: Any, rank: int) -> int:
    """The first rank that holds the region that ``rank`` holds."""
    return next(r for r, regions in enumerate(known) if name in regions and regions[name][0] == known[rank][name][0])


def _sends(known: list[Any], name: Any, rank: int) -> bool:
    first = _holder(known, name, rank)
    return first == rank or known[first][name] != known[rank][name]


def _spread(known: list[Any], sent: list[Any], name: Any, stages: bool) -> tuple[float, int]:
    worst = (0.0, 0)
    for rank, regions in enumerate(known):
        if name not in regions:
            if stages:
                continue
            return math.inf, rank
        first = _holder(known, name, rank)
        if regions[name] != known[first][name]:
            worst = max(worst, (distance(sent[first][name], sent[rank][name]), rank))
    return worst


def _whole(known: list[Any], sent: list[Any], name: Any) -> Tensor:
    first = next(rank for rank, regions in enumerate(known) if name in regions)
    part, (shape, dtype) = sent[first][name], known[first][name][2]
    if part.shape == shape:
        return part
    blank = float("nan") if dtype.is_floating_point else -1  # shows where no rank has anything
    whole = torch.full(shape, blank, dtype=dtype)
    for rank, regions in enumerate(known):
        if name in regions and _holder(known, name, rank) == rank:
            offsets, piece = regions[name][0], sent[rank][name]
            spans = (slice(begin, begin + size) for begin, size in zip(offsets, piece.shape, strict=True))
            whole[tuple(spans)] = piece
    return whole
