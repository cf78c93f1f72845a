"""Parts of complex tensors written as pairs of real numbers.

``spectrum[..., :m] = weighted`` becomes ``slice_scatter`` when in-place operators go, and that has no derivative for complex
numbers in PyTorch (nor has ``select_scatter``), while the assignment has one. Of pairs it has.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from shardwright.frontend.views import performed

aten = torch.ops.aten
_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)


def scatter_pairs(graph: Graph) -> None:
    """Put pairs of real numbers in place of the complex arguments of such operators."""
    for node in [n for n in graph.nodes if n.target in _SCATTERS and n.meta["val"].is_complex()]:
        with graph.inserting_before(node):
            node.replace_all_uses_with(_of_pairs(graph, node))
        graph.erase_node(node)


def _of_pairs(graph: Graph, node: Node) -> Node:
    call = partial(performed, graph, node)
    whole, part, *rest = node.args
    pairs = [call(aten.view_as_real.default, call(aten.resolve_conj.default, x)) for x in (whole, part)]
    dims = node.meta["val"].dim()
    given = dict(node.kwargs)
    if rest:
        given["dim"] = rest.pop(0)
    dim: Any = given.pop("dim", 0)
    made = call(node.target, *pairs, dim % dims, *rest, **given)
    return call(aten.view_as_complex.default, made)
