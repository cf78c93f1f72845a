"""One rank's part of a tensor: which region it is, how it is cut out, how it is shown as a part of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright.frontend.replay import value_of
from shardwright.graph import Constant
from shardwright.operators.rules import Layout
from shardwright.program.binding import Place, regions
from shardwright.program.dataflow import Dataflow
from shardwright.program.footprints import contiguous_strides
from shardwright.program.transfers import region_of
from shardwright.runtime.uneven import Uneven, put_together, show_uneven


def cut(tensor: Tensor, layout: Layout, place: Place) -> Tensor:
    """A view of one rank's part of a whole tensor."""
    return region_of(tensor, tuple(regions(tensor.shape, layout, place)))


def constant(entry: Constant, flow: Dataflow, device: torch.device) -> Tensor:
    """One rank's part of a tensor that is written into the model's code."""
    return cut(value_of(entry, flow.graph), flow.strategy.resting[entry.tensor], flow.place).to(device)


def distributed(
    local: Tensor, mesh: DeviceMesh, layout: Any, shape: Sequence[int], place: Place | None = None
) -> DTensor:
    """A local shard as a DTensor of the whole shape (contiguous strides); ``place`` where an axis may cut in shares."""
    size = torch.Size(shape)
    made = DTensor.from_local(local, mesh, layout, run_check=False, shape=size, stride=contiguous_strides(size))
    cuts = () if place is None else zip(layout, place.cuts, strict=True)
    if place is not None and any(isinstance(p, Shard) and isinstance(cut, tuple) for p, cut in cuts):
        show_uneven(made, place)
    return made


def cut_like(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole, lying as another does; nothing is sent."""
    mesh = like.device_mesh
    if isinstance(like, Uneven):
        local = cut(whole.detach().to(like.device), tuple(like.placements), like.place)  # type: ignore[arg-type]
        return distributed(local.clone(), mesh, like.placements, like.shape, like.place)
    everywhere = DTensor.from_local(whole.detach().to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=like.placements)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank of its mesh, each of which calls this; nothing goes back through it.

    What ``full_tensor`` gives, by collectives of the process group itself: gloo's functional gather, which that calls, now
    and then waits for ever (docs/running.md).
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(tensor, Uneven) or any(placement.is_partial() for placement in tensor.placements):
        return tensor.full_tensor().detach()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # every rank of its mesh
    sizes = tuple(mesh.shape)
    return put_together(tensor, Place(tuple((str(n), s) for n, s in enumerate(sizes)), tuple(coordinate), sizes))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device this rank computes on."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
