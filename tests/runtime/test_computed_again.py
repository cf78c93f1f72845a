"""What a compiled region keeps for passes back: the least cut, against every subset, and by the rules of what is kept."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from shardwright._torch_compat import plain_operators
from shardwright.runtime.computed_again import Again, Arrived, Crossing, Leaves, Recipe, _Flow, closed, least, settled


def region(work, *tensors):
    """The operators of a function of tensors, and their results by number."""
    return plain_operators(lambda given: list(work(*given)), list(tensors))


def kept_bytes(saved) -> int:
    return sum(node.meta["val"].untyped_storage().nbytes() for node in saved)


def test_a_norm_keeps_its_input_and_what_a_product_reads():
    """In bfloat16 it computes in float32: the operators keep that input and the normed one, the cut its own input."""

    def norm(x, weight, matrix):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = (wide * scale).to(x.dtype)
        read = normed * weight
        return read @ matrix, wide, scale, normed, read

    x, weight = torch.randn(32, 64).bfloat16(), torch.randn(64).bfloat16()
    traced = region(norm, x, weight, torch.randn(64, 64).bfloat16())
    back = [False, True, True, True, True]
    saved, again = least(traced, back, [True, *back[1:]], [x.nbytes, 0, 0])
    assert sorted(again) == [1, 3]  # not the scale, which is small, nor what the product reads
    assert kept_bytes(saved) == x.nbytes + 32 * 4 + x.nbytes
    there = least(traced, back, [True, *back[1:]], [0, 0, 0])[0]
    assert kept_bytes(n for n in there if n.op != "placeholder") == 32 * 4 + x.nbytes


def test_what_is_written_over_or_freed_is_no_part_of_a_cut():
    def work(x):
        y = x * 2
        return y.sin(), y.float().exp()

    x = torch.randn(8, 8).bfloat16()
    traced = region(work, x)
    ways = {}
    for cost in (x.nbytes, None):
        saved, again = least(traced, [False, True], [False, True], [cost])
        ways[cost] = [node.op for node in saved], [*again]
    assert ways[x.nbytes] == (["placeholder"], [1])
    assert ways[None][0] == ["call_function"]
    over, _ = least(traced, [False, True], [False, True], [None])
    assert not any(node is next(iter(traced.graph.nodes)) for node in over)
    # the first result stands anyway: what is made of it alone costs nothing
    traced = region(lambda x: ((y := x.cos()), y.float()), x)
    saved, again = least(traced, [False, True], [True, True], [x.nbytes])
    assert [*again] == [1] and [node.target for node in saved] == [torch.ops.aten.cos.default]


def test_products_and_draws_are_performed_once():
    x = torch.randn(16, 16)
    traced = region(lambda x: [x, (x @ x).relu()], x)
    saved, again = least(traced, [False, True], [True, False], [0])
    assert not again or all(node.target is torch.ops.aten.mm.default for node in saved)
    traced = region(lambda x: [x, torch.rand_like(x) + x], x)
    saved, _ = least(traced, [False, True], [True, False], [0])
    assert any(node.op == "call_function" for node in saved)


def test_values_come_back_the_same_and_shared_work_is_done_once():
    def work(x):
        wide = x.float().sin()
        return x * 2, wide, wide.exp(), wide + 1

    x = torch.randn(64).bfloat16()
    traced = region(work, x)
    crossing = Crossing((False, True, True, True), (False,) * 4, (False,) * 4, (1,))
    leaves = Leaves()
    results = [leaves.template(value) for value in (x, x, (x, "way"), [x])]
    cut, marks, count = crossing.cut(traced, results, [[x.nbytes]])
    assert count == 1
    made = cut(x)
    assert len(made) == 2  # the first result, and what the others are made of
    call, arrived = object(), Arrived(made, len(made) - count)
    given = [closed(mark, arrived, call) for mark in marks]
    assert isinstance(given[1], Again) and given[2][1] == "way"
    known = {}
    found, wanted = settled(given, known), work(x)
    assert found[2][1] == "way"
    torch.testing.assert_close([*found[:2], found[2][0], *found[3]], list(wanted), rtol=0, atol=0)
    assert len(known) == 1
    again = Leaves()
    again.opened(given[1:])
    assert len(again.all) == 1  # each tensor once


def test_another_region_takes_what_stands_for_values():
    def work(x):
        return x * 2, x.float().exp()

    x = torch.randn(8).bfloat16()
    traced = region(work, x)
    saved, again = least(traced, [False, True], [False, False], [1])
    recipe = Recipe(traced, saved, again.values())
    one, other = (Again(recipe, again[1], object(), (value,)) for value in (x, x + 1))
    leaves = Leaves()
    templates = [leaves.template(value) for value in (one, other, x)]
    arrived = Arrived(leaves.all, len(leaves.tensors))
    found = [settled(closed(template, arrived), arrived.known) for template in templates]
    torch.testing.assert_close(found, [x.float().exp(), (x + 1).float().exp(), x])
    assert Leaves().opened(one) == Leaves().opened(other)  # one function serves both


def test_a_part_of_something_larger_is_copied_out_where_the_rest_is_not_needed():
    def work(x, matrix, also):
        queries, values = (x @ matrix).chunk(2, -1)
        return queries.sum(), values.transpose(0, 1), *([queries.sin()] if also else [])

    x, matrix = torch.randn(16, 16), torch.randn(16, 64)
    for also in (False, True):
        traced = region(lambda x, matrix, also=also: work(x, matrix, also), x, matrix)
        crossing = Crossing((False, *[True] * (1 + also)), *[(False,) * (2 + also)] * 2, (None, None))
        marks = [Leaves().template(x)] * (2 + also)
        cut, _, count = crossing.cut(traced, marks, [[x.nbytes], [matrix.nbytes]])
        made = cut(x, matrix)
        kept = made[len(made) - count :] if count else made[1:]
        assert sum({y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in kept}.values()) == (
            16 * 64 * 4 if also else 16 * 32 * 4
        )
        if not also:
            torch.testing.assert_close(made[1], work(x, matrix, False)[1])
            assert made[1].stride() == (1, 32)


def test_of_what_is_only_measured_nothing_is_kept():
    """The gradient of a gather asks how large its input was."""
    x, matrix = torch.randn(16, 16), torch.randn(16, 64)
    traced = region(lambda x, matrix: [(y := x @ matrix).sum(), y, y.bool()], x, matrix)
    crossing = Crossing((False, True, True), (False, True, True), (False,) * 3, (1, 0))
    marks = [Leaves().template(x)] * 3
    cut, marks, count = crossing.cut(traced, marks, [[x.nbytes], [matrix.nbytes]])
    made = cut(x, matrix)
    assert (len(made), count) == (1, 0)
    known = {}
    for mark, dtype in zip(marks[1:], (torch.float32, torch.bool), strict=True):
        found = settled(closed(mark, Arrived(made, 1), object()), known)
        assert (found.shape, found.dtype, found.untyped_storage().nbytes()) == ((16, 64), dtype, dtype.itemsize)


def gathered(rank: int) -> list[str]:
    """The slots of products that a compiled program keeps for the gathers behind them."""
    from runtime.test_regions import uncompiled
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph
    from shardwright.runtime import parallelize, regions

    class Looking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 32)

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return torch.gather(self.layer(x), -1, index).sin().sum()

    torch.manual_seed(0)
    model, args = Looking().double(), (torch.randn(8, 16, dtype=torch.float64), torch.randint(32, (8, 5)))
    graph = capture(model, args)
    plan = plan_graph(graph, parse_cluster("4xH100"), Options("data-parallel", (), fewer_devices=False))
    before, regions.compiled_function = regions.compiled_function, uncompiled
    try:
        ours = parallelize(model, plan, graph=graph, device="cpu", keep=True)
        ours.compile()
        executor, kept = ours._planned.executor, list[str]()
        for _ in range(5):
            ours.zero_grad()
            run = executor.forward
            executor.forward = lambda sources, keep, run=run: kept.clear() or _noted(run(sources, keep), executor, kept)
            ours(*args).backward()
            executor.forward = run
        model(*args).backward()
        for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    finally:
        regions.compiled_function = before
    return kept


def _noted(run, executor, kept):
    for slot, value in enumerate(run.slots):
        for x in Leaves.of(value).all:
            if x.untyped_storage().nbytes() == 2 * 32 * 8:
                kept.append(executor.program.slots[slot].tensor)
    return run


def test_a_gather_keeps_nothing_of_what_it_reads(pool):
    assert pool.run(gathered) == [[], [], [], []]


@pytest.mark.parametrize("seed", range(20))
def test_the_flow_is_the_least_cut(seed):
    """Against every way to part the points of small random nets."""
    drawn, points = random.Random(seed), 7
    pipes = {
        (a, b): drawn.randint(1, 9)
        for a, b in itertools.permutations(range(points), 2)
        if drawn.random() < 0.45 and b != 0 and a != points - 1
    }
    flow = _Flow(points)
    for (a, b), room in pipes.items():
        flow.pipe(a, b, room)
    flow.fill(0, points - 1)
    behind = flow.reaching(points - 1)
    found = sum(room for (a, b), room in pipes.items() if a not in behind and b in behind)
    least_of_all = min(
        sum(room for (a, b), room in pipes.items() if a in side and b not in side)
        for size in range(points - 1)
        for rest in itertools.combinations(range(1, points - 1), size)
        for side in [{0, *rest}]
    )
    assert found == least_of_all
