"""One rank's part of a tensor: which region it is, how it is cut out, how it is shown as a part of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright._torch_compat import map_tree
from shardwright.graph import Constant
from shardwright.operators.rules import Cut, Layout, nested_chunk
from shardwright.program.binding import Place
from shardwright.program.dataflow import Dataflow


def regions(shape: Sequence[int], layout: Layout, place: Place) -> list[tuple[int, int]]:
    """``[start, stop)`` per dim of the part that one rank holds."""
    cuts: dict[int, list[tuple[Cut, int]]] = {}
    for placement, size, index in zip(layout, place.cuts, place.coordinate, strict=True):
        if isinstance(placement, Shard):
            cuts.setdefault(placement.dim, []).append((size, index))
    return [nested_chunk(extent, cuts.get(dim, ())) for dim, extent in enumerate(shape)]


def cut(tensor: Tensor, layout: Layout, place: Place) -> Tensor:
    """A view of one rank's part of a whole tensor."""
    for dim, (start, stop) in enumerate(regions(tensor.shape, layout, place)):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def constant(entry: Constant, flow: Dataflow, device: torch.device) -> Tensor:
    """One rank's part of a tensor that is written into the model's code."""
    meta = flow.graph.tensors[entry.tensor]
    whole = torch.frombuffer(bytearray(entry.data), dtype=getattr(torch, meta.dtype)).reshape(meta.shape)
    return cut(whole, flow.strategy.resting[entry.tensor], flow.place).to(device)


def distributed(local: Tensor, mesh: DeviceMesh, layout: Any, shape: Sequence[int]) -> DTensor:
    """A local shard as a DTensor of the whole shape (contiguous strides)."""
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    size = torch.Size(shape)
    return DTensor.from_local(local, mesh, layout, run_check=False, shape=size, stride=tuple(reversed(stride)))


def cut_like(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole, lying as another does; nothing is sent."""
    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole.detach().to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=like.placements)


def whole_tensors(tree: Any) -> Any:
    """The same containers with whole tensors on the host in place of DTensors; every rank calls this and has them all."""
    return map_tree(lambda leaf: leaf.full_tensor().detach().cpu() if isinstance(leaf, DTensor) else leaf, tree)


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device this rank computes on."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
