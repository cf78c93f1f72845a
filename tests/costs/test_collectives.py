"""Prices of collectives computed by hand: what each sends, over which link, with how many latencies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed.tensor import Shard

from shardwright.cluster import Axis, Mesh, parse_cluster
from shardwright.costs import collectives
from shardwright.costs.redistribute import COLLECTIVE_LAUNCHES, conversion, conversion_matrix, step_seconds

AXIS = Axis("gpu", 4, latency=2e-6, bandwidth=100e9)
MB = 1e6


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_gather", 3 * 2e-6 + 0.75 * 64e6 / 100e9),  # three hops; three quarters come from others
        ("reduce_scatter", 3 * 2e-6 + 0.75 * 64e6 / 100e9),
        ("all_reduce", 6 * 2e-6 + 1.5 * 64e6 / 100e9),  # both of the above
        ("all_to_all", 1.75 * 2e-6 + 0.75 * 64e6 / 100e9),  # a quarter stays; sends to the three others overlap
        ("broadcast", 2 * 2e-6 + 64e6 / 100e9),
        ("halo", 2 * 2e-6 + 64e6 / 100e9),
    ],
)
def test_a_collective_of_64_mb_over_four_devices(kind: str, seconds: float) -> None:
    assert collectives.SECONDS[kind](64 * MB, AXIS) == pytest.approx(seconds, rel=1e-12)


def test_a_fitted_all_to_all_is_the_line_that_was_measured() -> None:
    """Latency is that of the whole collective, once per doubling of devices."""
    measured = Axis("gpu", 4, 2e-6, 100e9, fits=(("all_to_all", 5e-6, 80e9),))
    assert collectives.all_to_all(64 * MB, measured) == pytest.approx(2 * 5e-6 + 0.75 * 64e6 / 80e9, rel=1e-12)


def test_turning_shards_of_rows_into_shards_of_columns_costs_what_an_all_to_all_does() -> None:
    """A float32 of 4096 x 4096 on four devices: each holds 16.8 MB and sends three quarters of them, and back again."""
    device = replace(parse_cluster("1xH200").device, launch_overhead=1e-6)
    mesh, size = Mesh((AXIS,), device), 4096 * 4096 * 4 / 4
    found = conversion((4096, 4096), "float32", (Shard(0),), (Shard(1),), mesh)
    packing = 2 * size / device.bandwidth  # read and written, since columns do not lie together
    by_hand = COLLECTIVE_LAUNCHES * 1e-6 + 1.75 * 2e-6 + 0.75 * size / 100e9 + packing
    for steps in (found.forward, found.backward):
        [step] = steps
        assert step.kind == "all_to_all"
        assert step_seconds(step, mesh) == pytest.approx(by_hand, rel=1e-9)
    matrix = conversion_matrix((4096, 4096), "float32", [(Shard(0),)], [(Shard(1),)], mesh, grad=True)
    assert [float(one[0, 0]) for one in matrix] == pytest.approx([by_hand, by_hand], rel=1e-9)
