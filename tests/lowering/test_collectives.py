"""Every step does on four ranks what its name says, forward and backward, for even and uneven extents."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwright.lowering.collectives import convert, exchange, scale_gradient
from shardwright.program.steps import BoundStep, Line, Region

SHAPES = [(8, 4), (9, 7), (10, 5), (4, 13)]


def line(rank: int) -> Line:
    return Line(dist.group.WORLD.group_name, 4, rank)


def whole(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_rank(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    return whole(shape, seed=100 + rank)


def shard(x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return x.narrow(dim, *_span(Line("", 4, rank).piece(x.shape[dim])))


def _span(region: Region) -> tuple[int, int]:
    return region.start, region.length


def gather_and_scatter(rank: int, shape: tuple[int, ...], dim: int) -> None:
    x = whole(shape)
    local = shard(x, dim, rank).clone().requires_grad_()
    steps = (
        BoundStep("all_gather", line(rank), dim, shape[dim]),
        BoundStep("reduce_scatter", line(rank), dim, shape[dim]),
    )
    result = convert(local, steps[:1], steps[1:])
    torch.testing.assert_close(result, x)
    assert result.is_contiguous()
    result.backward(of_rank(shape, rank))
    total = sum(of_rank(shape, r) for r in range(4))
    torch.testing.assert_close(local.grad, shard(total, dim, rank))


def slice_and_pad(rank: int, shape: tuple[int, ...], dim: int) -> None:
    x = whole(shape).requires_grad_()
    steps = BoundStep("slice", line(rank), dim, shape[dim]), BoundStep("zero_pad", line(rank), dim, shape[dim])
    result = convert(x, steps[:1], steps[1:])
    torch.testing.assert_close(result, shard(x, dim, rank))
    gradient = of_rank(shape, 0)
    result.backward(shard(gradient, dim, rank))
    total = x.grad.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, gradient)


def exchange_shards(rank: int, shape: tuple[int, ...], dim: int) -> None:
    other = 1 - dim
    x = whole(shape)
    local = shard(x, dim, rank).clone().requires_grad_()
    there = BoundStep("all_to_all", line(rank), dim, shape[dim], other, shape[other])
    back = BoundStep("all_to_all", line(rank), other, shape[other], dim, shape[dim])
    result = convert(local, (there,), (back,))
    torch.testing.assert_close(result, shard(x, other, rank))
    gradient = of_rank(shape, 0)
    result.backward(shard(gradient, other, rank))
    torch.testing.assert_close(local.grad, shard(gradient, dim, rank))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("what", [gather_and_scatter, slice_and_pad, exchange_shards])
def test_shards(pool, what, shape, dim):
    pool.run(what, shape, dim)


def reduces(rank: int) -> None:
    local = of_rank((3, 4), rank).requires_grad_()
    step = BoundStep("all_reduce", line(rank))
    total = convert(local, (step,), (step,))
    torch.testing.assert_close(total, sum(of_rank((3, 4), r) for r in range(4)))
    total.backward(torch.full_like(total, rank + 1.0))
    torch.testing.assert_close(local.grad, torch.full_like(local, 10.0))
    masked = convert(whole((3,)), (BoundStep("mask", line(rank)),), ())
    dist.all_reduce(masked)
    torch.testing.assert_close(masked, whole((3,)))


def exchanges(rank: int) -> None:
    local = of_rank((5,), rank).requires_grad_()
    lines = (line(rank),)
    torch.testing.assert_close(
        exchange(local, "max", lines), torch.stack([of_rank((5,), r) for r in range(4)]).amax(0), check_dtype=True
    )
    total = exchange(local, "sum", lines)
    total.backward(torch.full_like(total, rank + 1.0))
    torch.testing.assert_close(local.grad, torch.full_like(local, 10.0))
    complex_sum = exchange(torch.complex(local.detach(), local.detach()), "sum", lines)
    torch.testing.assert_close(complex_sum.imag, total.detach())


def scales(rank: int) -> None:
    x = torch.ones(3, requires_grad=True)
    scale_gradient(x, 0.25).sum().backward()
    assert x.grad.tolist() == [0.25] * 3


def halos(rank: int, extent: int, reach: tuple[int, int]) -> None:
    """A window that reaches further than one neighbour included."""
    x = whole((2, extent))
    holds = tuple(Line("", 4, r).piece(extent) for r in range(4))
    wants = tuple(Region(max(h.start - reach[0], 0), min(h.stop + reach[1], extent)) for h in holds)
    local = x[:, holds[rank].start : holds[rank].stop].clone().requires_grad_()
    there = BoundStep("halo", line(rank), 1, extent, wants=wants, holds=holds)
    result = convert(local, (there,), (there._replace(kind="halo_reduce"),))
    torch.testing.assert_close(result, x[:, wants[rank].start : wants[rank].stop])
    gradients = [of_rank((2, extent), r) for r in range(4)]
    result.backward(gradients[rank][:, wants[rank].start : wants[rank].stop])
    expected = torch.zeros_like(x)
    for want, gradient in zip(wants, gradients, strict=True):
        expected[:, want.start : want.stop] += gradient[:, want.start : want.stop]
    torch.testing.assert_close(local.grad, expected[:, holds[rank].start : holds[rank].stop])


@pytest.mark.parametrize("extent", [8, 9, 13])
@pytest.mark.parametrize("reach", [(1, 1), (0, 2), (3, 4)])
def test_halo(pool, extent, reach):
    pool.run(halos, extent, reach)


@pytest.mark.parametrize("what", [reduces, exchanges, scales])
def test_reductions(pool, what):
    pool.run(what)
