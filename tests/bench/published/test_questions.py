from __future__ import annotations

import pytest
from bench.published.questions import how_many_devices, largest_batch, part_of
from tests.search.joint.test_pipelines import graph_at

from shardwright.cluster import parse_cluster
from shardwright.errors import ClusterError
from shardwright.search.joint.pipelines import Model


def test_more_devices_are_never_slower_and_bring_less_each() -> None:
    answers = how_many_devices(
        Model(graph_at, blocks=8), parse_cluster("4xH100"), (1, 2, 4), batch=16, microbatch_sizes=(4,)
    )
    steps = [answer.plan.step_seconds for answer in answers if answer.plan]
    assert [answer.devices for answer in answers] == [1, 2, 4]
    assert steps == sorted(steps, reverse=True)  # a part of the devices may be left idle
    shares = [answer.samples_per_device_second for answer in answers]
    assert shares == sorted(shares, reverse=True)


def test_batches_until_one_does_not_fit() -> None:
    answers = largest_batch(Model(graph_at), parse_cluster("2xH100"), (8, 16), microbatch_sizes=(4,))
    assert [answer.batch for answer in answers if answer.plan] == [8, 16]
    assert answers[1].samples_per_second >= answers[0].samples_per_second


def test_a_part_of_a_cluster_is_whole_nodes() -> None:
    assert [part_of(parse_cluster("2x8xH100"), n).size for n in (4, 8, 16)] == [4, 8, 16]
    with pytest.raises(ClusterError, match="12 devices"):
        part_of(parse_cluster("2x8xH100"), 12)
