"""A change of layout does what it says (run on simulated ranks), is the cheapest there is, and so is its dual."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import Axis, Device, Mesh
from shardwright.costs import conversion, conversion_matrix, dual
from shardwright.costs.layouts import layout_graph, local_elements
from shardwright.costs.redistribute import _prices
from shardwright.operators.rules import Partial, Replicate, Shard, Window, nested_chunk

DEVICE = Device("d", "cuda", 10**10, 1e12, 1e-6, (("float32", 1e13),))
R, P = Replicate(), Partial("sum")


def mesh(*sizes: int) -> Mesh:
    return Mesh(tuple(Axis(f"a{i}", n, 1e-5 / (i + 1), 1e9 * (i + 1)) for i, n in enumerate(sizes)), DEVICE)


def ranks(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(n) for n in sizes)))


def lay_out(whole: np.ndarray, layout: tuple, sizes: tuple[int, ...], rng: np.random.Generator) -> dict:
    """Every rank's tensor: shards cut, unreduced sums torn apart at random."""
    held = {}
    torn = [axis for axis, p in enumerate(layout) if isinstance(p, Partial)]
    shares = {}
    for place in itertools.product(*(range(sizes[a]) for a in torn)):
        shares[place] = rng.integers(-9, 9, whole.shape)
    last = tuple(sizes[a] - 1 for a in torn)
    shares[last] = whole - sum(v for k, v in shares.items() if k != last)
    for rank in ranks(sizes):
        value = shares[tuple(rank[a] for a in torn)]
        for dim in range(whole.ndim):
            cuts = [(sizes[a], rank[a]) for a, p in enumerate(layout) if isinstance(p, Shard) and p.dim == dim]
            value = value.take(range(*nested_chunk(whole.shape[dim], cuts)), axis=dim)
        held[rank] = value
    return held


def run(held: dict, steps: tuple, source: tuple, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[dict, tuple]:
    """Execute the steps rank by rank, following the layout as it changes."""
    layout = list(source)
    for step in steps:
        axis, after = step.axis, dict(held)
        for rank in held:
            line = [held[(*rank[:axis], i, *rank[axis + 1 :])] for i in range(sizes[axis])]
            mine = rank[axis]

            def piece(value: np.ndarray, dim: int, index: int, axis: int = axis) -> np.ndarray:
                length = value.shape[dim]
                size = -(-length // sizes[axis])
                return value.take(range(min(index * size, length), min((index + 1) * size, length)), axis=dim)

            if step.kind == "all_gather":
                after[rank] = np.concatenate(line, axis=step.dim)
            elif step.kind == "all_reduce":
                after[rank] = sum(line)
            elif step.kind == "reduce_scatter":
                after[rank] = piece(sum(line), step.dim, mine)
            elif step.kind == "all_to_all":
                after[rank] = np.concatenate([piece(v, step.to_dim, mine) for v in line], axis=step.dim)
            elif step.kind == "slice":
                after[rank] = piece(held[rank], step.dim, mine)
            elif step.kind == "zero_pad":
                before = [v.shape[step.dim] for v in line]
                zeros = [np.zeros_like(v) for v in line]
                zeros[mine] = held[rank]
                after[rank] = np.concatenate(zeros, axis=step.dim)
                assert after[rank].shape[step.dim] == sum(before)
            elif step.kind == "mask":
                after[rank] = held[rank] if mine == 0 else np.zeros_like(held[rank])
            assert after[rank].size * 4 <= step.bytes_out and held[rank].size * 4 <= step.bytes_in
        new = {"all_gather": R, "all_reduce": R, "zero_pad": P, "mask": P}.get(step.kind)
        layout[axis] = new or Shard(step.to_dim if step.kind == "all_to_all" else step.dim)
        held = after
    return held, tuple(layout)


def whole_of(held: dict, layout: tuple, shape: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """Put the ranks' tensors together again, checking that replicas agree."""
    total = np.zeros(shape, dtype=np.int64)
    seen: dict = {}
    for rank, value in held.items():
        key = tuple(r for r, p in zip(rank, layout, strict=True) if not isinstance(p, Replicate))
        if key in seen:
            np.testing.assert_array_equal(seen[key], value)
            continue
        seen[key] = value
        spans = []
        for dim in range(len(shape)):
            cuts = [(sizes[a], rank[a]) for a, p in enumerate(layout) if isinstance(p, Shard) and p.dim == dim]
            spans.append(slice(*nested_chunk(shape[dim], cuts)))
        total[tuple(spans)] += value
    return total


PLACEMENT = st.sampled_from([R, P, Shard(0), Shard(1)])
SIZES = st.sampled_from([(2,), (3,), (2, 2), (2, 3), (2, 2, 2)])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_steps_do_what_they_say_in_both_directions(data: st.DataObject) -> None:
    sizes = data.draw(SIZES)
    shape = data.draw(st.tuples(st.integers(5, 14), st.integers(5, 14)))
    source, target = (tuple(data.draw(PLACEMENT) for _ in sizes) for _ in range(2))
    change = conversion(shape, "float32", source, target, mesh(*sizes))
    if not change.possible:
        states = local_elements(shape, layout_graph(2, len(sizes), (True,) * len(sizes)), sizes)
        graph = layout_graph(2, len(sizes), (True,) * len(sizes))
        assert np.isinf(states[[graph.state(source), graph.state(target)]]).any()
        return
    rng = np.random.default_rng(0)
    whole = rng.integers(-9, 9, shape)
    for steps, start, end in ((change.forward, source, target), (change.backward, dual(target), dual(source))):
        held, reached = run(lay_out(whole, start, sizes, rng), steps, start, shape, sizes)
        assert reached == end
        np.testing.assert_array_equal(whole_of(held, reached, shape, sizes), whole)


def _cheapest(shape: tuple[int, ...], source: int, target: int, where: Mesh) -> float:
    """Dijkstra on the same edges: the twin of the all-pairs search."""
    prices = _prices(shape, "float32", where, (True,) * len(where.axes))
    best, heap = {source: 0.0}, [(0.0, source)]
    while heap:
        cost, state = heapq.heappop(heap)
        if state == target:
            return cost
        for edge in prices.graph.leaving[state]:
            step, then = prices.edges[edge], int(prices.graph.target[edge])
            if cost + step < best.get(then, np.inf):
                best[then] = cost + step
                heapq.heappush(heap, (cost + step, then))
    return np.inf


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_cheapest_and_consistent_with_the_matrix(data: st.DataObject) -> None:
    sizes = data.draw(SIZES)
    shape = data.draw(st.tuples(st.integers(2, 4000), st.integers(2, 4000)))
    where = mesh(*sizes)
    layouts = [tuple(data.draw(PLACEMENT) for _ in sizes) for _ in range(4)]
    forward, backward = conversion_matrix(shape, "float32", layouts, layouts, where)
    graph = layout_graph(2, len(sizes), (True,) * len(sizes))
    for i, source in enumerate(layouts):
        for j, target in enumerate(layouts):
            change = conversion(shape, "float32", source, target, where)
            assert forward[i, j] == pytest.approx(_cheapest(shape, graph.state(source), graph.state(target), where))
            if change.possible:
                assert change.seconds == pytest.approx(forward[i, j])
                assert change.backward_seconds == pytest.approx(backward[i, j])
            else:
                assert forward[i, j] + backward[i, j] == np.inf
    assert not conversion_matrix(shape, "float32", layouts, layouts, where, grad=False)[1].any()


def test_the_textbook_changes() -> None:
    where, shape = mesh(4), (64, 64)
    kinds = lambda source, target: tuple(
        [s.kind for s in steps]
        for c in [conversion(shape, "float32", (source,), (target,), where)]
        for steps in (c.forward, c.backward)
    )
    assert kinds(P, R) == (["all_reduce"], ["all_reduce"])
    assert kinds(Shard(0), R) == (["all_gather"], ["reduce_scatter"])
    assert kinds(P, Shard(1)) == (["reduce_scatter"], ["all_gather"])
    assert kinds(R, Shard(0)) == (["slice"], ["zero_pad"])
    assert kinds(Shard(0), Shard(1)) == (["all_to_all"], ["all_to_all"])
    assert kinds(R, R) == ([], [])


def test_sums_over_several_axes_spare_the_slow_link() -> None:
    """Scatter along the fast axis, reduce a piece along the slow one, gather: where a piece is worth the launches."""
    kinds = lambda shape, where: [
        (s.kind, s.axis)
        for s in conversion(shape, "float32", (P,) * len(where.axes), (R,) * len(where.axes), where).forward
    ]
    nest = [("reduce_scatter", 1), ("all_reduce", 0), ("all_gather", 1)]
    assert kinds((4096, 4096), mesh(4, 8)) == nest
    assert kinds((10**7,), mesh(4, 8)) == nest
    assert sorted(kinds((8,), mesh(4, 8))) == [("all_reduce", 0), ("all_reduce", 1)]
    three = kinds((4096, 4096), mesh(2, 2, 2))
    assert three[2] == ("all_reduce", 0) and [kind for kind, _ in three] == [
        "reduce_scatter",
        "reduce_scatter",
        "all_reduce",
        "all_gather",
        "all_gather",
    ]


def test_too_short_to_be_cut_is_impossible() -> None:
    assert not conversion((3, 64), "float32", (R,), (Shard(0),), mesh(4)).possible
    assert not conversion((5, 64), "float32", (R,), (Shard(0),), mesh(4)).possible  # chunks of 2, 2, 1, none
    assert conversion((4, 64), "float32", (R,), (Shard(0),), mesh(4)).possible


def test_unreduced_maxima_are_only_reduced() -> None:
    where, top = mesh(2, 2), Partial("max")
    change = conversion((8, 8), "float32", (top, R), (R, R), where, grad=False)
    assert any(step.kind == "all_reduce" and step.reduce == "max" for step in change.forward)
    assert not conversion((8, 8), "float32", (R, R), (top, R), where).possible
    assert not conversion((8, 8), "float32", (top, R), (P, R), where).possible
    forward, _ = conversion_matrix((8, 8), "float32", [(top, R), (R, R)], [(R, R), (top, R)], where, grad=False)
    assert np.isfinite(forward).tolist() == [[True, True], [True, False]] and forward[0, 1] == 0


def test_windows_by_exchange_or_by_cutting() -> None:
    where, window, shape = mesh(2, 2), Window(2, 1, -1, 1), (4, 8, 32, 32)
    near = conversion(shape, "float32", (R, Shard(2)), (R, window), where)
    assert [s.kind for s in near.forward] == ["halo"] and [s.kind for s in near.backward] == ["halo_reduce"]
    cut = conversion(shape, "float32", (R, R), (R, window), where)
    assert [s.kind for s in cut.forward] == ["slice"] and [s.kind for s in cut.backward] == ["zero_pad"]
    assert cut.bytes == 0 < near.bytes and near.forward[0].window == window
    forward, backward = conversion_matrix(shape, "float32", [(R, Shard(2)), (R, R)], [(R, window)], where)
    assert forward[:, 0] == pytest.approx([near.seconds, cut.seconds])
    assert backward[:, 0] == pytest.approx([near.backward_seconds, cut.backward_seconds])


def test_a_window_wider_than_a_shard_is_not_exchanged() -> None:
    change = conversion((4, 8, 8, 8), "float32", (Shard(2),), (Window(2, 1, -3, 3),), mesh(4))
    assert change.possible and "halo" not in [step.kind for step in change.forward]
