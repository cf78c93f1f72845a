"""The legs that sum a bucket do sum it, on every rank; none is dearer than one axis after the other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import Axis, Device, Mesh, mesh_of, parse_cluster
from shardwright.costs import collectives
from shardwright.costs.replica_sums import cheapest_nest, leg_seconds, share_seconds
from shardwright.program import Sizes
from shardwright.program.sums import ReplicaSum, nested

BUCKET_BYTES = Sizes().bucket

DEVICE = Device("d", "cuda", 10**10, 1e12, 1e-6, (("float32", 1e13),))


def mesh(sizes: tuple[int, ...], faster: float = 4.0, latency: float = 1e-5) -> Mesh:
    """Every axis ``faster`` times as fast as the one before."""
    return Mesh(tuple(Axis(f"a{i}", n, latency, 1e9 * faster**i) for i, n in enumerate(sizes)), DEVICE)


def replica_sum(elements: int, itemsize: int, axes: tuple[int, ...], where: Mesh) -> ReplicaSum:
    return nested(elements, axes, cheapest_nest(elements, itemsize, axes, where)[0], where.sizes)


def perform(way: ReplicaSum, held: dict, sizes: tuple[int, ...]) -> dict:
    """Run the legs in place on every rank's flat array, as the runtime does."""
    views = {rank: [flat] for rank, flat in held.items()}
    for leg in way.legs:
        axis = leg.axis
        lines: dict = {}
        for rank in held:
            lines.setdefault((*rank[:axis], *rank[axis + 1 :]), []).append(rank)
        for line in lines.values():
            line.sort()
            if leg.kind == "all_gather":
                parts = [views[rank].pop() for rank in line]
                whole = np.concatenate(parts)
            else:
                whole = sum(views[rank][-1] for rank in line)
            assert len(whole) == leg.elements
            for place, rank in enumerate(line):
                if leg.kind == "reduce_scatter":
                    piece = views[rank][-1].reshape(len(line), -1)[place]
                    views[rank].append(piece)
                    piece[:] = whole.reshape(len(line), -1)[place]
                else:
                    views[rank][-1][:] = whole
    assert all(len(stack) == 1 for stack in views.values())
    return held


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_every_rank_ends_with_the_sum_and_it_is_the_cheapest_nest(data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from([(2,), (2, 2), (3, 2), (2, 4), (2, 2, 2), (2, 3, 2)]))
    axes = tuple(a for a in range(len(sizes)) if data.draw(st.booleans()) or a == 0)
    elements = data.draw(st.integers(1, 200))
    where = mesh(sizes, data.draw(st.sampled_from([0.5, 1.0, 8.0])), data.draw(st.sampled_from([0.0, 1e-9, 1e-5])))
    way = replica_sum(elements, 4, axes, where)
    assert elements <= way.elements < elements + np.prod(sizes)
    rng = np.random.default_rng(0)
    ranks = list(itertools.product(*(range(n) for n in sizes)))
    held = {rank: rng.integers(-9, 9, way.elements) for rank in ranks}
    expected = {
        rank: sum(held[o] for o in ranks if all(o[a] == rank[a] for a in range(len(sizes)) if a not in axes))
        for rank in ranks
    }
    found = perform(way, {rank: flat.copy() for rank, flat in held.items()}, sizes)
    for rank in ranks:
        np.testing.assert_array_equal(found[rank], expected[rank])
    plain = sum(float(collectives.all_reduce(4 * elements, where.axes[axis])) for axis in axes)
    assert cheapest_nest(elements, 4, axes, where)[1] <= plain * (1 + 1e-12)
    assert [leg.kind for leg in way.legs if leg.axis == axes[0]] == ["all_reduce"]  # the slowest link: once, the least


def test_across_nodes_each_link_carries_what_a_hierarchical_ring_sends() -> None:
    """Eight devices share their node's port: all of it together carries 2 (n-1)/n of the bucket, not eight times that."""
    where = mesh_of(parse_cluster("4x8xGTX-1080Ti"))
    size = 100 * 2**20
    way = replica_sum(size, 1, (0, 1), where)
    assert [(leg.kind, leg.axis, leg.elements) for leg in way.legs] == [
        ("reduce_scatter", 1, size),
        ("all_reduce", 0, size // 8),
        ("all_gather", 1, size),
    ]
    port = 12.5e9
    assert leg_seconds(way.legs[1], 1, where) == pytest.approx(2 * 3 / 4 * size / port, rel=0.02)


def test_small_buckets_are_not_taken_apart() -> None:
    assert [leg.kind for leg in replica_sum(4, 4, (0, 1), mesh((2, 8))).legs] == ["all_reduce", "all_reduce"]


def test_three_axes_nest() -> None:
    kinds = [(leg.kind, leg.axis) for leg in replica_sum(10**8, 4, (0, 1, 2), mesh((2, 2, 2))).legs]
    inner = [("reduce_scatter", 2), ("reduce_scatter", 1), ("all_reduce", 0), ("all_gather", 1), ("all_gather", 2)]
    assert kinds == inner


def test_a_gradient_pays_for_its_copy_and_its_share_of_a_full_bucket() -> None:
    where = mesh((2, 8))
    full = cheapest_nest(BUCKET_BYTES, 1, (0, 1), where)[1]
    copy = lambda size: max(2 * size / DEVICE.bandwidth, DEVICE.launch_overhead)
    small, large = BUCKET_BYTES // 100, 4 * BUCKET_BYTES
    assert share_seconds(small, (0, 1), where) == pytest.approx(copy(small) + full / 100, rel=1e-6)
    alone = cheapest_nest(large, 1, (0, 1), where)[1]
    assert share_seconds(large, (0, 1), where) == pytest.approx(copy(large) + alone)
    assert share_seconds(1000, (), where) == 0.0
