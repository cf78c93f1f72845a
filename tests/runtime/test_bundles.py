"""Parameters that travel together arrive as they would have alone, evenly cut or not, along any dim."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from lowering.strategies import mesh_with
from runtime.workers import built, device_mesh
from shardwright.lowering.collectives import convert, counting, in_place
from shardwright.program.steps import BoundStep, Line
from shardwright.runtime import parallelize
from shardwright.runtime.bundles import Gathering, Scattering, packed_gradients, packed_shards
from shardwright.runtime.shards import whole
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.verification.recorded import loss_of

SHAPES = [(8, 4), (9, 7), (5, 5), (4, 13), (3,), (1, 2, 6)]


def line(rank: int) -> Line:
    return Line(dist.group.WORLD.group_name, 4, rank)


def of_rank(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def shard(x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    mine = line(rank).piece(x.shape[dim])
    return x.narrow(dim, mine.start, mine.length)


def arrive_as_alone(rank: int) -> None:
    cases = [(of_rank(shape, 7), dim) for shape in SHAPES for dim in range(len(shape))]
    cases += [(of_rank((1, 0, 8), 7), 2)]  # tokens that a configuration has none of
    steps = [BoundStep("all_gather", line(rank), dim, x.shape[dim]) for x, dim in cases]
    gathering = Gathering.start(packed_shards([shard(x, dim, rank) for x, dim in cases], steps), steps[0])
    for (x, dim), step, stacked in zip(cases, steps, gathering.wait(), strict=True):
        torch.testing.assert_close(in_place(stacked, dim, step.extent, step.line), x, rtol=0, atol=0)
    gradients = [of_rank(tuple(x.shape), rank) for x, _ in cases]
    steps = [BoundStep("reduce_scatter", line(rank), dim, x.shape[dim]) for x, dim in cases]
    for (x, dim), mine in zip(cases, Scattering.start(packed_gradients(gradients, steps), steps).wait(), strict=True):
        total = sum(of_rank(tuple(x.shape), r) for r in range(4))
        torch.testing.assert_close(mine, shard(total, dim, rank))


def several_under_way(rank: int) -> None:
    """Gathers ahead of use beside reductions of gradients, as a backward pass has them: this once corrupted the heap."""
    x = of_rank((3, 2), rank)
    expected = torch.cat([of_rank((3, 2), r) for r in range(4)])
    gather, scatter = (BoundStep(kind, line(rank), 0, 12) for kind in ("all_gather", "reduce_scatter"))
    for _ in range(40):
        gathers = [Gathering.start(packed_shards([x] * n, [gather] * n), gather) for n in (1, 1, 2, 3)]
        scatters = [
            Scattering.start(packed_gradients([expected] * n, [scatter] * n), [scatter] * n) for n in (1, 1, 2, 3)
        ]
        total = convert(x, (BoundStep("all_reduce", line(rank)),), ())
        assert all(torch.equal(whole, expected) for gathering in gathers for whole in gathering.wait())
        for scattering in scatters:
            for mine in scattering.wait():
                torch.testing.assert_close(mine, 4 * shard(expected, 0, rank))
    torch.testing.assert_close(total, expected.view(4, 3, 2).sum(0))


def parts_of_bundles_without_gradient(rank: int) -> dict[str, int]:
    """Freezing some members leaves the others' gradients what they were, and still travelling together."""
    model, args, kwargs, graph = built("gpt:small")
    stated = formulate(graph, mesh_with((4,)), within=restriction("fsdp", 1))
    strategy = stated.strategy(solve(stated.problem).answer)
    reference = copy.deepcopy(model)
    parallel = parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph, keep=True)
    for module in (reference, parallel):
        for path, parameter in module.named_parameters():
            parameter.requires_grad_(not path.endswith("bias"))
    with counting() as performed:
        for _ in range(2):
            loss_of(reference(*args, **kwargs)).backward()
            loss_of(parallel(*args, **kwargs)).backward()
    for path, parameter in reference.named_parameters():
        gradient = parallel.get_parameter(path).grad
        assert (gradient is None) == path.endswith("bias"), path
        if gradient is not None:
            torch.testing.assert_close(whole(gradient), parameter.grad, rtol=1e-9, atol=1e-12)
    return {kind: count for (kind, _), count in performed.steps.items()}


@pytest.mark.parametrize("what", [arrive_as_alone, several_under_way])
def test_travelling_together(pool, what) -> None:
    pool.run(what)


def test_some_members_may_be_frozen(pool) -> None:
    counts = pool.run(parts_of_bundles_without_gradient, seconds=100)[0]
    assert counts["reduce_scatter"] < 10  # two steps of a few bundles, not of 34 parameters
