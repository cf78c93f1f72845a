"""Several parameters in one collective: shards packed into one flat tensor, gathered or scattered, and unpacked.

Which of them travel together is said by the program. One that travels alone is neither packed nor
unpacked. Gradients that arrive are views of one flat tensor; gathered parameters are copied out of theirs, because the
pieces of each lie apart in it, and it is freed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright._torch_compat import Pending, start_gathering, start_scattering
from shardwright.lowering.collectives import even_shard, even_stack, own_part
from shardwright.program.steps import BoundStep


class Packed(NamedTuple):
    """Shards or gradients in one flat tensor, each as long as on every other rank; zeros stand for those ``missing``."""

    flat: Tensor
    shapes: tuple[torch.Size, ...]
    missing: tuple[int, ...] = ()


def packed_shards(shards: Sequence[Tensor], steps: Sequence[BoundStep]) -> Packed:
    """Shards as they are gathered."""
    even = [even_shard(x, step.dim, step.extent, step.line) for x, step in zip(shards, steps, strict=True)]
    return Packed(torch.cat([x.view(-1) for x in even]) if len(even) > 1 else even[0], tuple(x.shape for x in even))


def packed_gradients(gradients: Sequence[Tensor], steps: Sequence[BoundStep]) -> Packed:
    """Gradients as they are scattered: the pieces of each rank follow each other."""
    ranks = steps[0].line.size
    stacks = [even_stack(x, step.dim, step.extent, step.line) for x, step in zip(gradients, steps, strict=True)]
    shapes = tuple(torch.Size((x.shape[0] // ranks, *x.shape[1:])) for x in stacks)
    if len(stacks) == 1:
        return Packed(stacks[0], shapes)
    return Packed(torch.cat([x.view(ranks, x.numel() // ranks) for x in stacks], 1), shapes)  # one may be empty: no -1


@dataclass(frozen=True, eq=False)
class Gathering:
    """Shards on their way to every rank; ``shapes`` are theirs."""

    pending: Pending
    shapes: tuple[torch.Size, ...]
    ranks: int

    @classmethod
    def start(cls, packed: Packed, step: BoundStep) -> Gathering:
        line = step.line
        return cls(start_gathering(packed.flat, line.size, line.group), packed.shapes, line.size)

    def wait(self) -> list[Tensor]:
        """The shards of every parameter, those of all ranks stacked along dim 0."""
        flat = self.pending.wait()
        if len(self.shapes) == 1:
            return [flat]
        sizes = [shape.numel() for shape in self.shapes]
        stacked = [flat.new_empty((self.ranks, size)) for size in sizes]
        torch.split_with_sizes_copy(flat.view(self.ranks, sum(sizes)), sizes, 1, out=stacked)
        return [x.view(self.ranks * shape[0], *shape[1:]) for x, shape in zip(stacked, self.shapes, strict=True)]


@dataclass(frozen=True, eq=False)
class Scattering:
    """Gradients on their way to the ranks that keep them; ``steps`` say how each is cut."""

    pending: Pending
    packed: Packed
    steps: tuple[BoundStep, ...]

    @classmethod
    def start(cls, packed: Packed, steps: Sequence[BoundStep]) -> Scattering:
        line, reduce = steps[0].line, steps[0].reduce
        started = start_scattering(packed.flat, reduce, line.size, line.group)
        return cls(started, packed._replace(flat=packed.flat[:0]), tuple(steps))

    def wait(self) -> list[Tensor | None]:
        """This rank's part of every sum, nothing for those that nobody brought."""
        mine, shapes = self.pending.wait(), self.packed.shapes
        parts = mine.view(-1).split([shape.numel() for shape in shapes])
        triples = enumerate(zip(parts, shapes, self.steps, strict=True))
        return [
            None if i in self.packed.missing else own_part(part.view(shape), step.dim, step.extent, step.line)
            for i, (part, shape, step) in triples
        ]
