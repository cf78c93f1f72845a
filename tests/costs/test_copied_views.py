"""A view that is copied takes no less than the same view that is not: bounds count on what surely happens alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.costs.compute import op_times
from shardwright.frontend import capture
from shardwright.operators import analyse


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        parts = y.repeat(4, 1, 1), y[:, :1].expand(64, 32, 128), y[3:9], y.transpose(1, 2).reshape(64, -1)
        return sum(part.float().square().mean() for part in parts) + sum(p.sum() for p in y.split(16))


@pytest.mark.parametrize("cluster", ["1xH200", "1xA100-40GB", "local:1"])
def test_a_copied_view_takes_no_less(cluster: str) -> None:
    with torch.device("meta"):
        graph = capture(Views(), (torch.empty(64, 32, 128),), {})
    mesh, seen = mesh_of(parse_cluster(cluster)), 0
    for op in graph.ops:
        rules = analyse(op, graph.tensors)
        if rules.kind != "view":
            continue
        plain, *copied = (
            op_times(op, rules, graph.tensors, [(None,)], mesh, copies=copies)[0]
            for copies in ("", "copy", "copy_rows")
        )
        for times in copied:
            assert (times >= plain).all() and times[0] > 0, op.name
        seen += 1
    assert seen >= 5
