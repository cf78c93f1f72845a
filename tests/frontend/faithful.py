"""The one question asked of every capture: does the graph compute what the model computes?"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwright.frontend import capture
from shardwright.frontend.replay import replay
from shardwright.graph import Graph, fingerprint, from_json, to_json


def faithful(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, meta: bool = True
) -> Graph:
    """Capture, and check results, gradients, buffers, the way through JSON, and that meta tensors give the same graph."""
    kwargs = dict(kwargs or {})
    graph = capture(model, args, kwargs)
    assert from_json(to_json(graph)) == graph
    eager, replayed = copy.deepcopy(model), copy.deepcopy(model)
    expected = _backward(eager, lambda: _kept(eager(*args, **kwargs), graph))
    actual = _backward(replayed, lambda: replay(graph, replayed, args, kwargs))
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one)
        else:
            assert one == other
    for (name, one), (_, other) in zip(eager.named_parameters(), replayed.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad)
    for one, other in zip(eager.buffers(), replayed.buffers(), strict=True):
        torch.testing.assert_close(other, one)
    if meta:
        on_meta = capture(_meta_twin(model), *_to_meta((args, kwargs)))
        assert fingerprint(on_meta) == fingerprint(graph)
    return graph


def _kept(output: Any, graph: Graph) -> Any:
    """What a model returns without what the graph says that it leaves out."""
    left_out = [note.split()[0] for note in graph.notes if "is left out" in note]
    return {key: item for key, item in output.items() if key not in left_out} if left_out else output


def _backward(model: nn.Module, run: Any) -> list[Any]:
    torch.manual_seed(0)
    leaves = tree_leaves(run())
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if floats:
        # Weights that differ per element, so that a permuted gradient shows.
        total = sum((leaf * torch.linspace(1, 2, leaf.numel()).view(leaf.shape)).sum() for leaf in floats)
        total.backward()
    return leaves


def _meta_twin(model: nn.Module) -> nn.Module:
    """``model`` on meta; unlike ``.to("meta")`` this keeps ties."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    memo |= {id(b): b.to("meta") for b in model.buffers()}
    return copy.deepcopy(model, memo)


def _to_meta(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, tree)


def targets(graph: Graph) -> list[str]:
    return [op.target for op in graph.ops]
