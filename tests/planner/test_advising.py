"""What is the user's to change: every gain is what simulating the changed model gives, and nothing else is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.planner.advising import advise
from shardwright.simulator import simulate_plan

CLUSTER = parse_cluster("2xH200")


class Words(nn.Module):
    """A tied head: the extent that is padded stands in two modules and in a view."""

    def __init__(self, words: int, width: int = 512) -> None:
        super().__init__()
        self.words, self.table = words, nn.Embedding(words, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.table(x)).view(-1, self.words), labels.view(-1))


def captured(words: int, rows: int = 32, dtype: torch.dtype = torch.bfloat16):
    with torch.device("meta"):
        model, x = Words(words).to(dtype), torch.zeros(rows, 256, dtype=torch.long)
    return capture(model, (x, x))


def planned(graph):
    return plan_graph(graph, CLUSTER, Options(search="data-parallel", baselines=(), fewer_devices=False))


@pytest.fixture(scope="module")
def odd():
    graph = captured(30_011)
    return planned(graph), graph


def test_padding_gains_what_the_padded_model_gains(odd) -> None:
    plan, graph = odd
    told = next(one for one in advise(plan, graph) if one.kind == "padding")
    assert "30,011" in told.change and "table.weight" in told.change and "30,016" in told.change
    other = captured(30_016)
    assert told.step_seconds == simulate_plan(planned(other), other).seconds
    assert told.gain == 1 - told.step_seconds / plan.prediction.step_seconds > 0.01


def test_what_is_whole_tiles_already_is_not_padded(odd) -> None:
    graph = captured(30_016)
    assert not [one for one in advise(planned(graph), graph) if one.kind == "padding"]


def test_another_dtype_gains_what_the_model_in_it_gains() -> None:
    graph = captured(30_016, dtype=torch.float32)
    plan = planned(graph)
    told = next(one for one in advise(plan, graph) if one.kind == "dtype")
    other = captured(30_016)
    assert told.step_seconds == pytest.approx(simulate_plan(planned(other), other).seconds, rel=0.02)
    assert not [one for one in advise(planned(other), other) if one.kind == "dtype"]


def test_more_rows_are_counted_by_the_row_and_stay_within_memory(odd) -> None:
    plan, graph = odd
    told = next(one for one in advise(plan, graph, lambda factor: captured(30_011, 32 * factor)) if one.kind == "batch")
    other = captured(30_011, 32 * told.rows)
    seconds = simulate_plan(planned(other), other).seconds
    assert told.step_seconds == seconds and told.gain == 1 - seconds / told.rows / plan.prediction.step_seconds
    assert told.fits and told.memory_bytes <= plan.meshes[0].device.usable_memory
    tight = replace(plan, asked=replace(plan.asked, memory_limit=1.5 * plan.prediction.memory_bytes))
    assert not [
        one for one in advise(tight, graph, lambda factor: captured(30_011, 32 * factor)) if one.kind == "batch"
    ]


def test_the_last_line_names_what_binds(odd) -> None:
    plan, graph = odd
    assert advise(plan, graph)[-1].kind == "bottleneck"
    node = CLUSTER.nodes[0]
    slow = replace(CLUSTER, nodes=(replace(node, link=replace(node.link, bandwidth=node.link.bandwidth / 1000)),))
    bound = plan_graph(graph, slow, Options(search="data-parallel", baselines=(), fewer_devices=False))
    assert "links of gpu" in advise(bound, graph)[-1].change
