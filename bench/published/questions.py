"""What-if questions about pipelines: how many devices are worth it, and the largest batch that fits in a given time.

Each is the same search asked several times; every answer is a plan with its bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.cluster import Cluster
from shardwright.errors import ClusterError, Infeasible
from shardwright.search.joint.pipelines import JointPlan, Model, search_pipelines


@dataclass(frozen=True)
class Answer:
    """One row: what was asked, and the plan or why there is none."""

    devices: int
    batch: int
    plan: JointPlan | None
    why: str = ""

    @property
    def samples_per_second(self) -> float:
        return self.batch / self.plan.step_seconds if self.plan else 0.0

    @property
    def samples_per_device_second(self) -> float:
        return self.samples_per_second / self.devices


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """The first ``devices`` devices of a cluster: whole nodes, or a part of the first one.

    >>> from shardwright.cluster import parse_cluster
    >>> part_of(parse_cluster("4x8xH100"), 16).size
    16
    """
    node = cluster.nodes[0]
    if devices <= node.devices:
        return replace(cluster, name=f"{devices} of {cluster.name}", nodes=(replace(node, devices=devices),))
    nodes, count = [], 0
    for one in cluster.nodes:
        if count < devices:
            nodes.append(one)
            count += one.devices
    if count != devices:
        raise ClusterError(
            f"{cluster.name} has no {devices} devices in whole nodes of {node.devices}.",
            f"Ask for a multiple of {node.devices}, at most {cluster.size}.",
        )
    return replace(cluster, name=f"{devices} of {cluster.name}", nodes=tuple(nodes))


def how_many_devices(
    model: Model, cluster: Cluster, counts: Sequence[int], *, batch: int, microbatch_sizes: Sequence[int]
) -> list[Answer]:
    """The best pipeline on ever more devices; what a further device brings shows in samples per device and second."""
    return [_asked(model, part_of(cluster, n), batch, microbatch_sizes) for n in counts]


def largest_batch(
    model: Model, cluster: Cluster, batches: Sequence[int], *, microbatch_sizes: Sequence[int]
) -> list[Answer]:
    """The best pipeline for each batch size, up to the first that does not fit."""
    answers: list[Answer] = []
    for batch in sorted(batches):
        answers.append(_asked(model, cluster, batch, [s for s in microbatch_sizes if batch % s == 0]))
        if answers[-1].plan is None:
            break
    return answers


def _asked(model: Model, cluster: Cluster, batch: int, sizes: Sequence[int]) -> Answer:
    try:
        plan, _ = search_pipelines(model, cluster, batch=batch, microbatch_sizes=sizes)
    except Infeasible as error:
        return Answer(cluster.size, batch, None, error.message)
    return Answer(cluster.size, batch, plan)
