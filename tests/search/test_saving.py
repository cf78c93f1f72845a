"""What autograd keeps, as the search assumes it."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.frontend import capture
from shardwright.search.saving import needed_in_backward


def test_whether_a_parameter_is_read_again_is_asked_of_autograd():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8))
    graph = capture(model, (torch.randn(4, 8),), {})
    by_path = {p.tensor: p.paths[0] for p in graph.parameters}
    needed = {
        by_path[name]
        for op in graph.ops
        for name in op.inputs
        if name in by_path and needed_in_backward(graph, op, name, "cuda")
    }
    # The input of the first layer wants no gradient, so nothing is multiplied by its weight again; native_layer_norm keeps
    # its bias, which it is handed with everything else.
    assert needed == {"2.weight", "3.weight", "3.bias"}
