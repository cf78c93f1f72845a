"""How a call gives tensors to the stages of this rank, and how their results are handed out.

Each stage takes its parts of every micro-batch from what the call brings, whole or as it lies
(:mod:`~shardwright.runtime.inputs`); whole results are put together from the parts that ranks have of them
(:mod:`~shardwright.runtime.deferred_results`). Both ways a gradient lies as its tensor does
(:mod:`~shardwright.runtime.boundary_steps`). Where all stages are on all ranks, autograd alone brings the gradients of
inputs back; otherwise ranks add up what they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.graph import Graph, Ref
from shardwright.lowering.collectives import run_steps
from shardwright.program.pipeline import Pipeline
from shardwright.runtime.deferred_results import ModuleOutput, ResultBroadcast, ResultParts, Whole
from shardwright.runtime.in_flight import CallInFlight, Key
from shardwright.runtime.rank import Rank
from shardwright.runtime.shards import distributed
from shardwright.runtime.stage_program import StageProgram

Parts = Mapping[tuple[int, int], StageProgram]


class Boundary:
    """The boundary of the stages of one kind of call."""

    def __init__(self, pipeline: Pipeline, parts: Parts, rank: Rank, broadcast: ResultBroadcast) -> None:
        self._micro, self._parts, self._rank, self._broadcast = pipeline.micro, parts, rank, broadcast
        body, sizes, world = self._micro.body, self._micro.sizes, dist.get_world_size()
        self._everywhere = all(len(stage.ranks) == world for stage in pipeline.stages)
        self.loss = None if self._micro.tail is not None else _loss(self._micro.whole)
        """The place of the output that backward passes start from where they do not wait for ``backward()``."""
        own = list(dict.fromkeys(stage for stage, _ in parts))
        self._brings = {stage: self._everywhere or pipeline.stages[stage].ranks[0] == dist.get_rank() for stage in own}
        self._slots: list[tuple[Key, StageProgram, str]] = [
            ((stage, number), parts[stage, size], name)
            for stage in own
            for number, size in enumerate(sizes)
            for name in parts[stage, size].given
        ]
        """Every piece: its stage and micro-batch, the program that reads it, its name there."""
        self._passes = [(stage, number) for stage in own for number in range(len(sizes))]
        made_by = {p: n for n, part in enumerate(next(iter(pipeline.parts.values()))) for p, _ in part.results}
        self.outputs: dict[int, ModuleOutput] = {}
        """Those that micro-batches give and that are tensors, by their places."""
        for place, out in enumerate(body.outputs):
            if isinstance(out, Ref):
                stage, meta = made_by[place], body.tensors[out.name]
                exits = tuple(parts[stage, size].exits[out.name] if stage in own else None for size in sizes)
                join, ranks = self._micro.joins[place], pipeline.stages[stage].ranks
                dtype = getattr(torch, meta.dtype)
                self.outputs[place] = ModuleOutput(out.name, exits, join, ranks, meta.shape, dtype, rank.device)
        self.roots = {place for place, output in self.outputs.items() if body.tensors[output.name].grad}
        roots = [] if self.loss is None else [self.loss]
        self.one = {p: torch.ones((), dtype=self.outputs[p].dtype, device=rank.device) for p in roots}
        """What arrives where passes back do not wait for anything: one, at the loss."""
        self._empty = torch.empty(0)

    def looked_at(self, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What a call brings, as every rank has it: results of earlier calls are fetched by all, whoever reads them."""
        return {name: x.whole() if isinstance(x, Whole) and not x.requires_grad else x for name, x in given.items()}

    def pieces(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's parts of what a call brings, after a tensor that makes every rank take part in the way back."""
        asking = [name for name, x in given.items() if x.requires_grad and self._micro.whole.tensors[name].grad]
        given = {name: x.detach() if x.requires_grad and name not in asking else x for name, x in given.items()}
        anchor = self._empty
        if asking and torch.is_grad_enabled() and not self._everywhere:
            anchor, *entered = _Entering.apply(self._rank.device, *(given[name] for name in asking))
            given |= dict(zip(asking, entered, strict=True))
        return [anchor, *(self._piece(key, part, name, given) for key, part, name in self._slots)]

    def _piece(self, key: Key, part: StageProgram, name: str, given: Mapping[str, Tensor]) -> Tensor:
        source, dim = self._micro.given[name]
        tensor, (stage, microbatch) = given[source], key
        if dim is not None:
            start, stop = self._micro.region(tensor.shape[dim], microbatch)
            tensor = tensor.narrow(dim, start, stop - start)
        if tensor.requires_grad and not self._brings[stage]:
            # Of the ranks of a stage, which all have the same gradient, one brings it.
            tensor = tensor.view_as(tensor)
            tensor.register_hook(torch.zeros_like)
        return part.arguments.part(name, tensor)

    def by_pass(self, pieces: Sequence[Tensor]) -> Mapping[Key, Sequence[Tensor]]:
        """The pieces that every pass of this rank reads."""
        found: dict[Key, list[Tensor]] = {key: [] for key in self._passes}
        for (key, _, _), piece in zip(self._slots, pieces[1:], strict=True):
            found[key].append(piece)
        return found

    def results(self, flight: CallInFlight, keep: bool) -> list[Tensor]:
        """The outputs of the batch, in order: a loss, and what every rank has, at once, others when they are looked at."""
        found: list[Tensor] = []
        sources = {id(x) for own in flight.sources.values() for x in own}
        given = {x.untyped_storage().data_ptr() for x in flight.given}

        def alone(x: Tensor) -> Tensor:
            """Autograd wants results of its functions to be nobody else's."""
            if id(x) in sources or x.untyped_storage().data_ptr() in given:
                x = x.clone()
            sources.add(id(x))
            return x

        for place, output in self.outputs.items():
            parts = [flight.results.get((place, number)) for number in range(len(output.exits))]
            own = ResultParts(output, [alone(x) if keep and x is not None else x for x in parts])
            if self._rank.outputs != "whole" and own.parts[0] is not None:
                found.append(own.parts[0])
            elif output.elements == 1 or output.known or (self.loss is None and not output.everywhere):
                found.append(own.whole(self._broadcast if keep and place == self.loss else None))
            else:
                found.append(Whole(own))
        return found

    def handed_out(self, name: str, value: Tensor) -> Tensor:
        """A result as the caller wants it: whole ones as they are; the compiler is shown how those are put together."""
        compiling, outputs = torch.compiler.is_compiling(), self._rank.outputs
        if outputs == "local" or (outputs == "whole" and not compiling):
            return value
        (part,) = self._parts.values()
        layout = part.flow.values[part.results[name]].needs
        if all(isinstance(placement, Replicate) for placement in layout):
            return value
        if outputs == "whole" and self.loss is None:
            return part.exits[name](value)
        if compiling and self.loss is not None:
            # The compiler wants a gradient for every DTensor that it hands out, and a loss alone brings none.
            value = value.detach()
        return distributed(value, part.rank.mesh, layout, self._micro.whole.tensors[name].shape)

    def arriving(self, arrived: Mapping[int, Tensor], place: int, microbatch: int) -> Tensor | None:
        """The gradient of this rank's part of an output for one micro-batch, from those that came back."""
        micro, output = self._micro, self.outputs[place]
        gradient, join = arrived.get(place), output.join
        if gradient is None or self._rank.outputs != "whole":
            return gradient
        if isinstance(join, Shard):
            start, stop = micro.region(gradient.shape[join.dim], microbatch)
            gradient = gradient.narrow(join.dim, start, stop - start)
        elif not isinstance(join, Partial) and microbatch > 0:
            return None  # every micro-batch gives the same: one of them takes the gradient
        crossing = output.exits[microbatch]
        assert crossing is not None  # asked for by a pass of the stage that made it
        return run_steps(gradient, crossing.backward)

    def gradients(self, flight: CallInFlight, scale: Tensor | None) -> Iterator[Tensor | None]:
        """Those of the pieces of a call."""
        yield None
        for key, part, name in self._slots:
            gradient = flight.found.get(key, {}).get(part.flow.rest[name])
            yield gradient if gradient is None or scale is None else gradient * scale.to(gradient.dtype)


class _Entering(torch.autograd.Function):
    """Whole tensors on their way to the stages; their gradients are added up on all ranks, also on those that read nothing
    of them."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, *whole: Tensor) -> Any:
        ctx.device, ctx.like = device, [(x.shape, x.dtype, x.device) for x in whole]
        ctx.set_materialize_grads(False)
        return torch.empty(0), *(x.view_as(x) for x in whole)

    @staticmethod
    def backward(ctx: Any, anchor: Tensor | None, *gradients: Tensor | None) -> Any:
        found = []
        for (shape, dtype, device), gradient in zip(ctx.like, gradients, strict=True):
            total = torch.zeros(shape, dtype=dtype, device=ctx.device)
            if gradient is not None:
                total.add_(gradient.to(ctx.device))
            dist.all_reduce(total)
            found.append(total.to(device))
        return None, *found


def _loss(graph: Graph) -> int | None:
    """The first scalar with a gradient."""
    for place, out in enumerate(graph.outputs):
        if isinstance(out, Ref) and graph.tensors[out.name].grad and not graph.tensors[out.name].shape:
            return place
    return None
