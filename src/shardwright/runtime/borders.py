"""How a call gives tensors to the stages of this rank, and how their results are handed out.

Where one mesh of all ranks takes the batch in one go, whatever is on one rank is on all, whole or in parts: tensors go over
the border by the steps of the mesh (:class:`Here`). Otherwise each stage takes its part of every micro-batch from whole
tensors, which all ranks have, and results lie on the ranks of one stage, from where they are fetched (:class:`Fetching`).
Either way a gradient lies as its tensor does (:mod:`~shardwright.runtime.border`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.graph import Graph, Ref
from shardwright.lowering.collectives import run_steps
from shardwright.program.pipeline import Pipeline
from shardwright.runtime.border import Whole, handed_out
from shardwright.runtime.fetched import Fetched, Telling
from shardwright.runtime.flight import Flight, Key
from shardwright.runtime.part import Part
from shardwright.runtime.rank import Rank
from shardwright.runtime.shards import distributed

Parts = Mapping[tuple[int, int], Part]


class Here:
    """The border of a mesh that everything is on."""

    def __init__(self, pipeline: Pipeline, parts: Parts, rank: Rank, telling: Telling) -> None:
        (self._part,) = parts.values()
        self._rank, self._graph = rank, pipeline.micro.whole
        self.places, self.names = _outputs(pipeline)
        self.loss: int | None = None
        part, roots = self._part, self._part.executor.program.roots
        self.roots = {place for place, name in part.part.results if part.results[name] in roots}
        found = [self._graph.tensors[name] for name in self.names]
        self._has_loss = any(tensor.grad and tensor.elements == 1 for tensor in found)

    def looked_at(self, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What a call brings, as every rank has it."""
        return given

    def pieces(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's parts of what a call brings."""
        arguments = self._part.arguments
        return [arguments.part(name, given[name]) for name in self._part.given]

    def by_pass(self, pieces: Sequence[Tensor]) -> Mapping[Key, Sequence[Tensor]]:
        return {(0, 0): pieces}

    def results(self, flight: Flight, keep: bool) -> list[Tensor]:
        """The outputs that are tensors, in order, as this rank has them."""
        found = [flight.results[place, 0] for place in self.places]
        if keep:  # autograd wants results of its functions to be nobody else's
            (sources,) = flight.sources.values()
            seen = {id(x) for x in sources}
            lying = {x.untyped_storage().data_ptr() for x in flight.given}
            for number, value in enumerate(found):
                if id(value) in seen or value.untyped_storage().data_ptr() in lying:
                    found[number] = value = value.clone()
                seen.add(id(value))
        return found

    def handed_out(self, name: str, value: Tensor) -> Tensor:
        """Whole results as they are, cut ones as the caller wants them."""
        part = self._part
        layout, outputs = part.flow.values[part.results[name]].needs, self._rank.outputs
        if outputs == "local" or all(isinstance(placement, Replicate) for placement in layout):
            return value
        shape, crossing = self._graph.tensors[name].shape, part.exits[name]
        compiling = torch.compiler.is_compiling()
        if outputs == "whole" and not (compiling and self._has_loss):
            return crossing(value) if compiling else handed_out(value, crossing, shape)
        if compiling and self._has_loss:
            # The compiler wants a gradient for every DTensor that it hands out, and a loss alone brings none.
            value = value.detach()
        return distributed(value, part.rank.mesh, layout, shape)

    def arriving(self, arrived: Mapping[int, Tensor]) -> Callable[[int, int], Tensor | None]:
        """The gradients of this rank's parts of the outputs, from those that came back."""
        return lambda place, microbatch: arrived.get(place)

    def gradients(self, flight: Flight, scale: Tensor | None) -> list[Tensor | None]:
        """Those of the pieces of a call."""
        found, rest = flight.found.get((0, 0), {}), self._part.flow.rest
        return [found.get(rest[name]) for name in self._part.given]


class Fetching:
    """The border of stages: each takes its parts of the micro-batches, and results lie where they were made."""

    def __init__(self, pipeline: Pipeline, parts: Parts, rank: Rank, telling: Telling) -> None:
        self._pipeline, self._micro, self._parts, self._rank = pipeline, pipeline.micro, parts, rank
        self._telling = telling
        self.places, self.names = _outputs(pipeline)
        body = self._micro.body
        self.roots = {place for place, name in zip(self.places, self.names, strict=True) if body.tensors[name].grad}
        self.loss = None if self._micro.tail is not None else _loss(self._micro.whole)
        """The place of the output that backward passes start from where they do not wait for ``backward()``."""
        first = next(iter(pipeline.parts.values()))
        self._made_by = {place: number for number, part in enumerate(first) for place, _ in part.results}
        sizes = self._micro.sizes
        self._slots: list[tuple[Key, Part, str]] = [
            ((stage, number), parts[stage, size], name)
            for stage in dict.fromkeys(stage for stage, _ in parts)
            for number, size in enumerate(sizes)
            for name in parts[stage, size].given
        ]
        """Every piece: its stage and micro-batch, the program that reads it, its name there."""
        self._empty = torch.empty(0)

    def looked_at(self, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What a call brings, as every rank has it: results of earlier calls are fetched by all, whoever reads them."""
        return {name: x.whole() if isinstance(x, Whole) and not x.requires_grad else x for name, x in given.items()}

    def pieces(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's parts of what a call brings, after a tensor that makes every rank take part in the way back."""
        tensors = self._micro.whole.tensors
        asking = [name for name, x in given.items() if x.requires_grad and tensors[name].grad]
        if asking and torch.is_grad_enabled():
            entered = _Entering.apply(self, {**given}, asking, *(given[name] for name in asking))
            return list(entered)
        return [self._empty, *self.parts_of(given)]

    def parts_of(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        return [self._piece(slot, given) for slot in self._slots]

    def _piece(self, slot: tuple[Key, Part, str], given: Mapping[str, Tensor]) -> Tensor:
        (_, microbatch), part, name = slot
        source, dim = self._micro.given[name]
        tensor = given[source].detach()
        if dim is not None:
            start, stop = self._micro.region(tensor.shape[dim], microbatch)
            tensor = tensor.narrow(dim, start, stop - start)
        return part.arguments.part(name, tensor)

    def joined(self, asking: Sequence[str], shapes: Mapping[str, Any], pieces: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of whole inputs from those of the pieces: summed over the stages that read them, the same on every
        rank."""
        micro, device, here = self._micro, self._rank.device, dist.get_rank()
        totals = {name: torch.zeros(shapes[name][0], dtype=shapes[name][1], device=device) for name in asking}
        for (key, part, name), piece in zip(self._slots, pieces, strict=True):
            source, dim = micro.given[name]
            if source not in totals or piece is None:
                continue
            whole = part.arguments.joined(name, piece)
            if here != self._pipeline.stages[key[0]].ranks[0]:
                continue  # of the ranks of a stage, which all have the same, one brings it
            total = totals[source]
            if dim is not None:
                start, stop = micro.region(total.shape[dim], key[1])
                total = total.narrow(dim, start, stop - start)
            total.add_(whole)
        for name in asking:
            dist.all_reduce(totals[name])
        return [totals[name] for name in asking]

    def by_pass(self, pieces: Sequence[Tensor]) -> Mapping[Key, Sequence[Tensor]]:
        found: dict[Key, list[Tensor]] = {
            (stage, number): []
            for stage in dict.fromkeys(stage for stage, _ in self._parts)
            for number in range(len(self._micro.sizes))
        }
        for (key, _, _), piece in zip(self._slots, pieces[1:], strict=True):
            found[key].append(piece)
        return found

    def results(self, flight: Flight, keep: bool) -> list[Tensor]:
        """The outputs of the batch, in order: a loss at once, others when they are looked at."""
        micro, graph = self._micro, self._micro.body
        found: list[Tensor] = []
        for place, name in zip(self.places, self.names, strict=True):
            meta, join, stage = graph.tensors[name], micro.joins[place], self._made_by[place]
            mine = [flight.results.get((place, number)) for number in range(len(micro.sizes))]
            exits = [
                self._parts[stage, size].exits[name].forward if mine[number] is not None else ()
                for number, size in enumerate(micro.sizes)
            ]
            ranks = self._pipeline.stages[stage].ranks
            own = [None if x is None else x.detach() for x in mine]
            result = Fetched(own, exits, join, ranks, meta.shape, getattr(torch, meta.dtype), self._rank.device)
            if keep and place == self.loss:
                found.append(result.whole(self._telling))
            else:
                found.append(result.whole() if meta.elements == 1 or self.loss is None else result)
        return found

    def _name(self, place: int) -> str:
        return self.names[self.places.index(place)]

    def handed_out(self, name: str, value: Tensor) -> Tensor:
        """As it is: fetched when it is looked at."""
        return value

    def arriving(self, arrived: Mapping[int, Tensor]) -> Callable[[int, int], Tensor | None]:
        """The gradient of this rank's part of an output for one micro-batch."""
        return partial(self._part_of, arrived)

    def _part_of(self, arrived: Mapping[int, Tensor], place: int, microbatch: int) -> Tensor | None:
        micro = self._micro
        gradient, join = arrived.get(place), micro.joins[place]
        if gradient is None:
            return None
        if isinstance(join, Shard):
            start, stop = micro.region(gradient.shape[join.dim], microbatch)
            gradient = gradient.narrow(join.dim, start, stop - start)
        elif not isinstance(join, Partial) and microbatch > 0:
            return None  # every micro-batch gives the same: one of them takes the gradient
        part = self._parts[self._made_by[place], micro.sizes[microbatch]]
        return run_steps(gradient, part.exits[self._name(place)].backward)

    def gradients(self, flight: Flight, scale: Tensor | None) -> list[Tensor | None]:
        """Those of the pieces of a call."""
        found: list[Tensor | None] = [torch.zeros_like(flight.given[0])]
        for key, part, name in self._slots:
            gradient = flight.found.get(key, {}).get(part.flow.rest[name])
            if gradient is not None and scale is not None:
                gradient = gradient * scale.to(gradient.dtype)
            found.append(gradient)
        return found


class _Entering(torch.autograd.Function):
    """Whole tensors cut into the pieces of this rank; their gradients are put together on all ranks, also on those that read
    nothing of them."""

    @staticmethod
    def forward(ctx: Any, border: Fetching, given: Mapping[str, Tensor], asking: Sequence[str], *whole: Tensor) -> Any:
        ctx.border, ctx.asking = border, asking
        ctx.shapes = {name: (x.shape, x.dtype) for name, x in zip(asking, whole, strict=True)}
        ctx.devices = [x.device for x in whole]
        ctx.set_materialize_grads(False)
        pieces = [torch.empty(0), *(piece.clone() for piece in border.parts_of(given))]
        ctx.mark_non_differentiable(*(x for x in pieces if not (x.is_floating_point() or x.is_complex())))
        return tuple(pieces)

    @staticmethod
    def backward(ctx: Any, anchor: Tensor | None, *pieces: Tensor | None) -> Any:
        found = ctx.border.joined(ctx.asking, ctx.shapes, pieces)
        return None, None, None, *(x.to(device) for x, device in zip(found, ctx.devices, strict=True))


def _outputs(pipeline: Pipeline) -> tuple[list[int], list[str]]:
    """The outputs that micro-batches give and that are tensors: their places and names."""
    found = [(place, out.name) for place, out in enumerate(pipeline.micro.body.outputs) if isinstance(out, Ref)]
    return [place for place, _ in found], [name for _, name in found]


def _loss(graph: Graph) -> int | None:
    """The first scalar with a gradient."""
    for place, out in enumerate(graph.outputs):
        if isinstance(out, Ref) and graph.tensors[out.name].grad and not graph.tensors[out.name].shape:
            return place
    return None
