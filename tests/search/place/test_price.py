"""A captured model priced for placement: sums agree with the cost model, sharing and unlike devices are understood."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from shardwright.cluster import Axis, Cluster, Mesh, parse_cluster
from shardwright.costs import op_times
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.search.place.measure import violations
from shardwright.search.place.price import workload_of
from shardwright.search.place.problem import Rules
from shardwright.search.place.solve import place


class Tied(nn.Module):
    """An embedding whose weight is also the output layer, with layers between."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x @ self.embed.weight.t()).logsumexp(-1).mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Tied(), (torch.zeros(512, 32, dtype=torch.int64),), {})


def test_times_are_those_of_the_cost_model(graph: Graph) -> None:
    cluster = parse_cluster("4xH100")
    workload = workload_of(graph, cluster)
    mesh = Mesh((Axis("device", 1, 1e-6, 1e9),), cluster.device)
    expected = sum(
        op_times(op, analyse(op, graph.tensors), graph.tensors, [(None,)], mesh)[0].sum() for op in graph.ops
    )
    assert workload.times.sum() == pytest.approx(expected)
    assert workload.backward.any() and workload.kinds[0].count == 4
    inference = workload_of(graph, cluster, training=False)
    assert not inference.backward.any() and inference.parameter_bytes.sum() == 0
    assert inference.memory.sum() < workload.memory.sum()


def test_transfers_are_bytes_over_the_slowest_link(graph: Graph) -> None:
    cluster = parse_cluster("4xH100")
    workload = workload_of(graph, cluster, training=False)
    link = cluster.nodes[0].link.per_device(4)
    op = next(op for op in graph.ops if "relu" in op.target)
    size = graph.tensors[op.outputs[0] or ""].bytes
    row = workload.names.index(op.name)
    assert workload.transfer[row] == pytest.approx(link.latency + size / link.bandwidth)


def test_tied_weights_do_not_make_one_stage(graph: Graph) -> None:
    workload = workload_of(graph, parse_cluster("4xH100"))
    found = place(workload, rules=Rules(overlap=True))
    assert violations(workload, found.answer) == []
    assert len(found.answer.stages) > 1
    assert found.cost < workload.times.sum()
    assert np.isfinite(found.cost) and found.optimal


def test_unlike_nodes_are_unlike_kinds(graph: Graph) -> None:
    fast, slow = parse_cluster("2xH100"), parse_cluster("2xA100-80GB")
    workload = workload_of(graph, Cluster("both", (*fast.nodes, *slow.nodes), fast.network))
    assert [(kind.name, kind.count) for kind in workload.kinds] == [("H100", 2), ("A100-80GB", 2)]
    assert (workload.times[:, 1] >= workload.times[:, 0] - 1e-12).all()
    found = place(workload)
    assert violations(workload, found.answer) == []
