"""Several parameters in one collective: shards packed into one flat tensor, gathered or scattered, and unpacked.

Which of them travel together is :mod:`shardwright.costs.bundles`' decision. One that travels alone is neither packed nor
unpacked. Gradients that arrive are views of one flat tensor; gathered parameters are copied out of theirs, because the
pieces of each lie apart in it, and it is freed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright._torch_compat import Pending, start_gathering, start_scattering
from shardwright.lowering.collectives import BoundStep, even_shard, even_stack, own_part


@dataclass(frozen=True, eq=False)
class Gathering:
    """Shards on their way to every rank; ``shapes`` are theirs."""

    pending: Pending
    shapes: tuple[torch.Size, ...]
    ranks: int

    @classmethod
    def start(cls, shards: Sequence[Tensor], steps: Sequence[BoundStep]) -> Gathering:
        line = steps[0].line
        even = [even_shard(x, step.dim, step.extent, line) for x, step in zip(shards, steps, strict=True)]
        packed = torch.cat([x.view(-1) for x in even]) if len(even) > 1 else even[0]
        return cls(start_gathering(packed, line.size, line.group), tuple(x.shape for x in even), line.size)

    @property
    def bytes(self) -> int:
        return self.pending.result.nbytes

    def wait(self) -> list[Tensor]:
        """The shards of every parameter, those of all ranks stacked along dim 0."""
        flat = self.pending.wait()
        if len(self.shapes) == 1:
            return [flat]
        sizes = [shape.numel() for shape in self.shapes]
        stacked = [flat.new_empty((self.ranks, size)) for size in sizes]
        torch.split_with_sizes_copy(flat.view(self.ranks, -1), sizes, 1, out=stacked)
        return [x.view(-1, *shape[1:]) for x, shape in zip(stacked, self.shapes, strict=True)]


@dataclass(frozen=True, eq=False)
class Scattering:
    """Gradients on their way to the ranks that keep them; ``steps`` say how each is cut."""

    pending: Pending
    shapes: tuple[torch.Size, ...]
    steps: tuple[BoundStep, ...]

    @classmethod
    def start(cls, gradients: Sequence[Tensor], steps: Sequence[BoundStep]) -> Scattering:
        line, reduce = steps[0].line, steps[0].reduce
        stacks = [even_stack(x, step.dim, step.extent, line) for x, step in zip(gradients, steps, strict=True)]
        shapes = tuple(torch.Size((x.shape[0] // line.size, *x.shape[1:])) for x in stacks)
        packed = torch.cat([x.view(line.size, -1) for x in stacks], 1) if len(stacks) > 1 else stacks[0]
        return cls(start_scattering(packed, reduce, line.size, line.group), shapes, tuple(steps))

    def wait(self) -> list[Tensor]:
        """This rank's part of every sum."""
        mine = self.pending.wait()
        parts = mine.view(-1).split([shape.numel() for shape in self.shapes])
        pairs = zip(parts, self.shapes, self.steps, strict=True)
        return [own_part(part.view(shape), step.dim, step.extent, step.line) for part, shape, step in pairs]
