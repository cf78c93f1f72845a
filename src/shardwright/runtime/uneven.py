"""DTensors whose parts are the shares of a mesh axis: what PyTorch's own, cut as ``torch.chunk`` cuts, cannot say.

Element by element nothing changes: optimizers, norms and sums work on local parts. What asks where a part lies is answered
here: ``full_tensor``, ``redistribute``, and ``torch.distributed.checkpoint``, through the protocol by which it asks any
tensor for its chunks. What operators make of such a tensor in its own shape (an optimizer's state, a copy) lies as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright._torch_compat import local_of, without_torch_function
from shardwright.lowering.collectives import run_steps
from shardwright.operators.rules import Layout
from shardwright.program.binding import Place, bind, regions
from shardwright.program.steps import Step


class Uneven(DTensor):
    """One rank's part of a tensor that mesh axes cut in shares; ``place`` says how they cut and which part is this one."""

    place: Place

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with without_torch_function():
            made = func(*args, **(kwargs or {}))
        source = next((x for x in args if isinstance(x, Uneven)), None)
        if source is not None and type(made) is DTensor and _lies_alike(made, source):
            show_uneven(made, source.place)
        return made

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor, on every rank; nothing goes back through it."""
        return put_together(self, self.place)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        if placements is not None and tuple(placements) == tuple(self.placements):
            return self
        mesh = self.device_mesh if device_mesh is None else device_mesh
        whole = DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=placements, **options)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        spans = regions(self.shape, tuple(self.placements), self.place)  # type: ignore[arg-type]  # see above
        sizes = torch.Size(stop - start for start, stop in spans)
        return [ChunkStorageMetadata(offsets=torch.Size(start for start, _ in spans), sizes=sizes)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        properties = TensorProperties.create_from_tensor(local_of(self))
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]


def put_together(tensor: DTensor, place: Place) -> Tensor:
    """A tensor of which this rank has the part at a place, whole; every rank of its mesh calls this."""
    layout: Layout = tuple(tensor.placements)  # type: ignore[arg-type]  # parameters are never partial sums
    gathers = [
        Step("all_gather", axis, placement.dim, None, 0, 0)
        for axis, placement in reversed(list(enumerate(layout)))
        if isinstance(placement, Shard)
    ]
    steps, _ = bind(gathers, layout, tensor.shape, place)
    groups = {name: tensor.device_mesh.get_group(axis).group_name for axis, (name, _) in enumerate(place.axes)}
    bound = (step._replace(line=step.line._replace(group=groups[step.line.group])) for step in steps)
    return run_steps(local_of(tensor).detach(), tuple(bound))


def _lies_alike(one: DTensor, other: DTensor) -> bool:
    spec, local = (one.shape, one.placements), local_of(one).shape
    return spec == (other.shape, other.placements) and local == local_of(other).shape


def show_uneven(tensor: DTensor, place: Place) -> None:
    """From now on a tensor knows that its axes cut in shares."""
    tensor.__class__ = Uneven
    tensor.place = place  # type: ignore[attr-defined]  # it is one now
