"""The steps of a layout change as functions of one rank's tensor, and their differentiable composition.

A step moves a tensor along one mesh axis: gather, reduce, scatter, exchange, or a free local cut. Shards follow
``torch.chunk`` (every piece but the last non-empty one has the same length) or the shares of their axis, so uneven shards
are padded to the longest for gathers and scatters and cut off again afterwards; exchanges send exact sizes.
:func:`convert` runs the forward steps and, in the backward pass, the backward steps (gradient layouts are dual: ``Shard``
stays ``Shard``, ``Replicate`` and ``Partial`` change places). Everything is built of collectives that become functional ones
where they are traced, and of static integers, so that ``torch.compile(fullgraph=True)`` traces it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwright._torch_compat import (
    all_reduced,
    exchanged,
    has_data,
    owns_storage,
    start_gathering,
    start_scattering,
)
from shardwright.program.steps import COMMUNICATION, BoundStep, Line, Region


def all_reduce(x: Tensor, reduce: str, line: Line, in_place: bool = False) -> Tensor:
    """Sum (or ``max``, ``min``, ``product``) of the ranks' tensors; ``in_place``: it may take the place of this one."""
    if x.is_complex():
        return torch.view_as_complex(all_reduce(torch.view_as_real(x.resolve_conj()), reduce, line))
    return all_reduced(x, reduce, line.group, in_place and owns_storage(x))


def even_shard(x: Tensor, dim: int, extent: int, line: Line) -> Tensor:
    """A shard as long as every other one, as it is gathered: contiguous and padded where it is the shorter one."""
    return _pad(x, dim, line.longest(extent)).contiguous().resolve_conj()


def in_place(stacked: Tensor, dim: int, extent: int, line: Line) -> Tensor:
    """From shards stacked along dim 0, as they arrive, to the tensor whose ``dim`` they are shards of."""
    if dim == 0 and not isinstance(line.cut, tuple):
        return stacked.narrow(0, 0, extent) if stacked.shape[0] != extent else stacked
    parts = stacked.chunk(line.size)
    lengths = [line.piece(extent, i).length for i in range(line.size)]
    if len(set(lengths)) == 1:
        return torch.cat(parts, dim)
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)


def all_gather(x: Tensor, dim: int, extent: int, line: Line) -> Tensor:
    """Put the shards of ``dim`` together."""
    pending = start_gathering(even_shard(x, dim, extent, line), line.size, line.group)
    return in_place(pending.wait(), dim, extent, line)


def even_stack(x: Tensor, dim: int, extent: int, line: Line) -> Tensor:
    """The shards of ``dim`` stacked along dim 0, each as long as every other one, as they are scattered."""
    if isinstance(line.cut, tuple):
        pieces = (x.narrow(dim, *_span(line.piece(extent, i))) for i in range(line.size))
        return torch.cat([_pad(part, dim, line.longest(extent)) for part in pieces])
    padded = _pad(x, dim, line.longest(extent) * line.size)
    return (padded if dim == 0 else torch.cat(padded.chunk(line.size, dim))).contiguous()


def own_part(shard: Tensor, dim: int, extent: int, line: Line) -> Tensor:
    """A shard as it arrives without what it was padded with."""
    length = line.piece(extent).length
    return shard.narrow(dim, 0, length) if length != shard.shape[dim] else shard


def reduce_scatter(x: Tensor, dim: int, extent: int, reduce: str, line: Line) -> Tensor:
    """Reduce the ranks' tensors, keep this rank's piece of ``dim``."""
    if x.is_complex():
        return torch.view_as_complex(reduce_scatter(torch.view_as_real(x.resolve_conj()), dim, extent, reduce, line))
    pending = start_scattering(even_stack(x, dim, extent, line), reduce, line.size, line.group)
    return own_part(pending.wait(), dim, extent, line)


def all_to_all(x: Tensor, dim: int, extent: int, to_dim: int, to_extent: int, line: Line) -> Tensor:
    """From shards of ``dim`` to shards of ``to_dim``: every rank sends every other its piece."""
    parts = [x.narrow(to_dim, *_span(line.piece(to_extent, i))) for i in range(line.size)]
    shape = list(x.shape)
    shape[to_dim] = line.piece(to_extent).length
    received = [[*shape[:dim], line.piece(extent, i).length, *shape[dim + 1 :]] for i in range(line.size)]
    return torch.cat(_send(parts, received, line), dim)


def halo(x: Tensor, step: BoundStep) -> Tensor:
    """From the shard of ``dim`` that this rank holds to the region that it wants, the rest coming from its neighbours."""
    mine, line = step.holds[step.line.position], step.line
    parts = [_cut(x, step.dim, mine.overlap(want), mine.start) for want in step.wants]
    want = step.wants[line.position]
    received = [_resized(x, step.dim, hold.overlap(want).length) for hold in step.holds]
    return torch.cat(_send(parts, received, line), step.dim)


def halo_reduce(x: Tensor, step: BoundStep) -> Tensor:
    """The adjoint of :func:`halo`: send the borders' gradients home and add them there."""
    want, line = step.wants[step.line.position], step.line
    parts = [_cut(x, step.dim, hold.overlap(want), want.start) for hold in step.holds]
    mine = step.holds[line.position]
    overlaps = [mine.overlap(other) for other in step.wants]
    pieces = _send(parts, [_resized(x, step.dim, overlap.length) for overlap in overlaps], line)
    total = x.new_zeros(_resized(x, step.dim, mine.length))
    for overlap, part in zip(overlaps, pieces, strict=True):
        before, after = overlap.start - mine.start, mine.stop - overlap.stop
        if overlap.length:
            total = total + _surround(part, step.dim, before, after)
    return total


def run_step(x: Tensor, step: BoundStep, in_place: bool = False) -> Tensor:
    """One step on this rank's tensor; ``in_place``: nobody else needs that."""
    result = _run_step(x, step, in_place)
    if _LEDGER is not None and not torch.compiler.is_compiling():
        _LEDGER.record(step, x, result)
    return result


def _run_step(x: Tensor, step: BoundStep, in_place: bool) -> Tensor:
    kind, line = step.kind, step.line
    if kind == "all_reduce":
        return all_reduce(x, step.reduce, line, in_place)
    if kind == "all_gather":
        return all_gather(x, step.dim, step.extent, line)
    if kind == "reduce_scatter":
        return reduce_scatter(x, step.dim, step.extent, step.reduce, line)
    if kind == "all_to_all":
        return all_to_all(x, step.dim, step.extent, step.to_dim, step.to_extent, line)
    if kind == "slice":
        return x.narrow(step.dim, *_span(step.mine))
    if kind == "zero_pad":
        mine = step.mine
        return _surround(x, step.dim, mine.start, step.extent - mine.stop)
    if kind == "mask":
        return x if line.position == 0 else _nothing_of(x)
    if kind == "halo":
        return halo(x, step)
    if kind == "halo_reduce":
        return halo_reduce(x, step)
    raise ValueError(f"no step is called {kind!r}")


def run_steps(x: Tensor, steps: Sequence[BoundStep]) -> Tensor:
    """Steps in order, none of them differentiable by itself."""
    for step in steps:
        x = run_step(x, step)
    return x


STAGES = "stages"
"""What stands for a process group where stages send each other values."""


@dataclass
class Ledger:
    """What was communicated: per (kind, process group), how many steps and how many bytes (of the larger side)."""

    steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def record(self, step: BoundStep, before: Tensor, after: Tensor) -> None:
        if step.kind in COMMUNICATION:
            self.add(step, max(before.nbytes, after.nbytes))

    def parcel(self, size: int) -> None:
        """So many bytes sent to a rank of another stage."""
        self.steps["send", STAGES] += 1
        self.bytes["send", STAGES] += size

    def add(self, step: BoundStep, size: int) -> None:
        """A collective of this many bytes."""
        self.steps[step.kind, step.line.group] += 1
        self.bytes[step.kind, step.line.group] += size


_LEDGER: Ledger | None = None


def ledger() -> Ledger | None:
    """The ledger that is being written, if any."""
    return _LEDGER


@contextmanager
def counting() -> Iterator[Ledger]:
    """Count the communication of everything run inside, forward and backward.

    >>> with counting() as performed:
    ...     pass
    >>> sum(performed.bytes.values())
    0
    """
    global _LEDGER
    before, _LEDGER = _LEDGER, Ledger()
    try:
        yield _LEDGER
    finally:
        _LEDGER = before


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: tuple[BoundStep, ...], backward: tuple[BoundStep, ...]) -> Tensor:
        ctx.backward_steps = backward
        return run_steps(x, forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return run_steps(gradients[0], ctx.backward_steps), None, None


def convert(x: Tensor, forward: tuple[BoundStep, ...], backward: tuple[BoundStep, ...]) -> Tensor:
    """Change the layout of ``x`` with the forward steps; its gradient travels back with the backward steps."""
    if not x.requires_grad:
        return run_steps(x, forward)
    return _Convert.apply(x, forward, backward)


class _SumBetween(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lines: tuple[Line, ...]) -> Tensor:
        ctx.lines = lines
        return _reduce_along(x, "sum", lines)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _reduce_along(gradients[0], "sum", ctx.lines), None


def exchange(x: Tensor, reduce: str, lines: tuple[Line, ...]) -> Tensor:
    """Reduce a statistic between the pieces of a loop: Partial becomes Replicate, and so does its gradient for a sum."""
    if reduce == "sum" and x.requires_grad:
        return _SumBetween.apply(x, lines)
    if has_data(x):
        return _reduce_along(x.detach(), reduce, lines)
    for line in lines:
        x = statistic(x.detach(), reduce, line.group)
    return x


@torch.library.custom_op("shardwright::statistic", mutates_args=())
def statistic(x: Tensor, reduce: str, group: str) -> Tensor:
    """A statistic that no gradient goes back through, as one operator: where pieces are traced, the exchange is seen."""
    return _reduce_along(x, reduce, (Line(group, 0, 0),))


@statistic.register_fake
def _(x: Tensor, reduce: str, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """The same value; its gradient is multiplied. A result every rank holds receives the same gradient on each of them."""
    return _Scale.apply(x, factor) if factor != 1.0 and x.requires_grad else x


_FUNCTIONAL_REDUCE = {"sum": "sum", "max": "max", "min": "min", "prod": "product", "product": "product"}


def _reduce_along(x: Tensor, reduce: str, lines: tuple[Line, ...]) -> Tensor:
    for line in lines:
        total = all_reduce(x, _FUNCTIONAL_REDUCE[reduce], line)
        if _LEDGER is not None and not torch.compiler.is_compiling():
            _LEDGER.record(BoundStep("all_reduce", line), x, total)
        x = total
    return x


def _send(parts: list[Tensor], received: list[list[int]], line: Line) -> list[Tensor]:
    """Send ``parts[i]`` to rank ``i``, get one tensor of the given shape from each."""
    counts = [torch.Size(shape).numel() for shape in received]
    flat = torch.cat([part.reshape(-1) for part in parts])
    sizes = [part.numel() for part in parts]
    pairs = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat  # gloo sends no complex numbers
    arrived = exchanged(pairs, counts, sizes, line.group)
    arrived = torch.view_as_complex(arrived) if flat.is_complex() else arrived
    return [part.view(shape) for part, shape in zip(arrived.split(counts), received, strict=True)]


def _nothing_of(x: Tensor) -> Tensor:
    """Zeros in place of ``x``. Compiled, they still depend on it: a compiler merges collectives of equal constants, and
    would do so on the ranks that hold zeros alone."""
    return x.masked_fill(x == x, 0) if torch.compiler.is_compiling() else torch.zeros_like(x)


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    missing = length - x.shape[dim]
    return _surround(x, dim, 0, missing) if missing else x


def _surround(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Zeros before and after along one dim."""
    parts = [x.new_zeros(_resized(x, dim, n)) if n else None for n in (before, after)]
    return torch.cat([part for part in (parts[0], x, parts[1]) if part is not None], dim)


def _cut(x: Tensor, dim: int, region: Region, origin: int) -> Tensor:
    return x.narrow(dim, region.start - origin if region.length else 0, region.length)


def _resized(x: Tensor, dim: int, length: int) -> list[int]:
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]


def _span(region: Region) -> tuple[int, int]:
    return region.start, region.length
