"""Parameters, buffers and optimizer state move from one layout to another while a job runs, on all ranks together.

Both layouts say which region of every tensor lies on which rank; what a rank has already is copied, the rest comes from one
of those that hold it, and nothing else travels. Tensors move one after the other, so that beside what is held there is never
more than one new part and what is on its way of it. A tensor stays the object that it is, so that optimizers and whoever
else refers to it need not be told; ranks that did not have it before make one, with the optimizer state that came along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import lie_as, local_of
from shardwright.errors import RunError
from shardwright.graph import Graph, Parameter
from shardwright.operators.rules import Layout
from shardwright.operators.strategy import Strategy
from shardwright.program.binding import Place
from shardwright.program.resting import in_equal_parts
from shardwright.program.transfers import Holding, Parcel, Region, parcels_between, region_of
from shardwright.runtime.shards import distributed
from shardwright.runtime.uneven import Uneven

Held = Mapping[str, Any]
"""This rank's parameters and buffers by the names of the graph."""
Regions = Mapping[int, Region]
"""Which part of a tensor lies on which rank."""


under_way = False
"""Whether this process is in the middle of a move: some tensors lie as before, some as after it."""


@dataclass(frozen=True)
class Resting:
    """How one tensor lies: the part of every rank that has one, and how this rank shows its own."""

    regions: dict[int, Region]
    mesh: DeviceMesh | None = None
    layout: Layout = ()
    place: Place | None = None

    def shown(self, local: Tensor, shape: Sequence[int], always: bool) -> Tensor:
        """A part as a DTensor; what lies whole everywhere may stay a plain tensor."""
        if self.mesh is None or not (always or any(p.is_shard() for p in self.layout)):
            return local
        return distributed(local, self.mesh, self.layout, shape, self.place)


def resting(
    graph: Graph, strategy: Strategy, ranks: Sequence[int], mesh: DeviceMesh | None, coordinate: Sequence[int] | None
) -> dict[str, Resting]:
    """How the parameters and buffers of a graph lie on these ranks; ``coordinate``: this rank's place among them, if any."""
    equal, found = in_equal_parts(graph, strategy), {}
    for name in (*(p.tensor for p in graph.parameters), *(b.tensor for b in graph.buffers)):
        layout = strategy.resting[name]
        cuts = strategy.sizes if name in equal else strategy.cuts
        regions = Holding(tuple(layout), strategy.sizes, cuts).regions(graph.tensors[name].shape)
        place = None if coordinate is None else Place(strategy.axes, tuple(coordinate), cuts)
        found[name] = Resting(dict(zip(ranks, regions, strict=True)), mesh if place else None, layout, place)
    return found


@dataclass(frozen=True)
class _Told:
    """What a rank that will hold a parameter for the first time is told of it by those who hold it."""

    dtype: torch.dtype
    group: int | None = None
    graded: bool = False
    like: dict[str, torch.dtype] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


class Moving:
    """Everything of a model that moves between two layouts; the same on every rank."""

    def __init__(
        self,
        graph: Graph,
        held: Held,
        optimizer: torch.optim.Optimizer | None,
        before: Mapping[str, Resting],
        after: Mapping[str, Resting],
        device: torch.device,
    ) -> None:
        self._graph, self._held, self._optimizer, self._device = graph, held, optimizer, device
        self._before, self._after, self._rank = before, after, dist.get_rank()
        groups = () if optimizer is None else optimizer.param_groups
        self._group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        self._refuse_strangers()

    def _refuse_strangers(self) -> None:
        """Optimizer state that lies neither as its parameter does nor the same everywhere cannot be cut anew."""
        for entry in self._graph.parameters:
            for key, value in self._state(entry.tensor).items():
                if isinstance(value, DTensor) and not self._like(value, entry.tensor):
                    raise RunError(
                        f"The optimizer's {key!r} of {entry.paths[0]} is a DTensor {list(value.shape)}, and the parameter "
                        f"{list(self._held[entry.tensor].shape)}: it cannot be moved with it.",
                        "Move nothing while such an optimizer is in use, or resume from a checkpoint under the other plan.",
                    )

    def perform(self) -> dict[str, Any]:
        """Move everything; gives this rank's parameters and buffers as they lie from now on."""
        global under_way
        under_way = True
        found = self._performed()
        under_way = False
        return found

    def _performed(self) -> dict[str, Any]:
        told, found, known = self._tell(), dict[str, Any](), dict[int, Any]()
        for name in self._before:
            old = self._held.get(name)
            if old is not None and id(old) in known:  # the same tensor under two names
                found[name] = known[id(old)]
                continue
            new = self._moved(name, old, self._graph.parameter_of.get(name), told.get(name))
            if new is not None:
                found[name] = new
            if old is not None:
                known[id(old)] = new
        return found

    def _moved(self, name: str, old: Any, parameter: Parameter | None, told: _Told | None) -> Any:
        before, after = self._before[name], self._after[name]
        if (before.regions, before.mesh, before.place) == (after.regions, after.mesh, after.place):
            return old
        shape = self._graph.tensors[name].shape

        def moved(held: Any, dtype: torch.dtype) -> Any:
            local = None if held is None else local_of(held).detach()
            here = exchanged(local, dtype, self._device, before.regions, after.regions)
            return None if here is None else after.shown(here, shape, parameter is not None)

        if told is None:  # everybody who will hold it holds it already, or nobody does
            assert old is not None or self._rank not in before.regions
            told = self._described(name) if old is not None else _Told(torch.float32)
        new = moved(old, told.dtype)
        if parameter is None:
            return new
        state, gradient = self._state(name), None if old is None else old.grad
        like = {key: moved(state.get(key), dtype) for key, dtype in told.like.items()}
        graded = moved(gradient, told.dtype) if told.graded else None
        if old is not None and new is None:
            self._leave(old)
            return None
        if new is None:
            return None
        if old is None:
            old = torch.nn.Parameter(new, requires_grad=parameter.trainable)
            self._join(old, told)
        else:
            relaid(old, new)
        old.grad = graded
        if self._optimizer is not None:
            kept = self._optimizer.state.get(old)
            if kept is not None or like or told.plain:
                self._optimizer.state[old] = {**told.plain, **(kept or {}), **like}
        return old

    def _leave(self, parameter: Any) -> None:
        """This rank no longer has a parameter, and its optimizer none of its state."""
        if self._optimizer is None:
            return
        self._optimizer.state.pop(parameter, None)
        for group in self._optimizer.param_groups:
            group["params"] = [other for other in group["params"] if other is not parameter]

    def _join(self, parameter: Any, told: _Told) -> None:
        """A parameter that is new to this rank belongs to the group that it belonged to elsewhere."""
        if self._optimizer is not None and told.group is not None:
            self._optimizer.param_groups[told.group]["params"].append(parameter)

    def _tell(self) -> dict[str, _Told]:
        """What newcomers must know, of every parameter and buffer that has one; the first of its holders tells."""
        names = [n for n in self._before if set(self._after[n].regions) - set(self._before[n].regions)]
        if not names:
            return {}
        mine = {n: self._described(n) for n in names if min(self._before[n].regions) == self._rank}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        return {name: about for told in every for name, about in told.items()}

    def _described(self, name: str) -> _Told:
        held = self._held[name]
        if not isinstance(held, torch.nn.Parameter):
            return _Told(held.dtype)
        state = self._state(name)
        like = {key: value.dtype for key, value in state.items() if self._like(value, name)}
        plain = {key: value for key, value in state.items() if key not in like}
        return _Told(held.dtype, self._group_of.get(id(held)), held.grad is not None, like, plain)

    def _state(self, name: str) -> dict[str, Any]:
        held = self._held.get(name)
        return {} if self._optimizer is None or held is None else self._optimizer.state.get(held, {})

    def _like(self, value: Any, name: str) -> bool:
        return isinstance(value, DTensor) and value.shape == self._held[name].shape


def relaid(tensor: Any, new: Any) -> None:
    """Let a DTensor lie as another one does, with its numbers."""
    lie_as(tensor, new)
    tensor.__class__ = type(new)
    if isinstance(new, Uneven):
        tensor.place = new.place


def exchanged(
    local: Tensor | None, dtype: torch.dtype, device: torch.device, before: Regions, after: Regions
) -> Tensor | None:
    """This rank's part after a move, of the part that it has now; every rank of either layout calls this."""
    rank, every = dist.get_rank(), parcels_between(before, after)
    wanted = after.get(rank)
    new = None if wanted is None else torch.empty([b - a for a, b in wanted], dtype=dtype, device=device)
    work: list[dist.P2POp] = []
    arriving: list[tuple[Parcel, Tensor]] = []
    for number, parcel in enumerate(every):
        if parcel.source == rank == parcel.target:
            assert local is not None and new is not None
            region_of(new, parcel.put).copy_(region_of(local, parcel.take))
        elif parcel.source == rank:
            assert local is not None
            work.append(dist.P2POp(dist.isend, region_of(local, parcel.take).contiguous(), parcel.target, tag=number))
        elif parcel.target == rank:
            buffer = torch.empty(parcel.shape, dtype=dtype, device=device)
            work.append(dist.P2POp(dist.irecv, buffer, parcel.source, tag=number))
            arriving.append((parcel, buffer))
    for under_way in dist.batch_isend_irecv(work) if work else ():
        under_way.wait()
    for parcel, buffer in arriving:
        assert new is not None
        region_of(new, parcel.put).copy_(buffer)
    return new
