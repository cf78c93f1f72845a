"""What the search assumes autograd keeps for the backward pass: a quick estimate, before any strategy is known.

The exact account, operator by operator from what autograd really saves, is ``costs.memory``; the planner compares the two
and corrects the search's estimate where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.graph import Graph, Op
from shardwright.operators.rules import OpRules

_KEEPS_NOTHING = {"add", "sub", "neg", "sum", "clone", "copy", "to", "_to_copy", "contiguous", "cat", "mean", "stack"}

_BIASED = {"linear": 2, "conv1d": 2, "conv2d": 2, "conv3d": 2, "convolution": 2, "addmm": 0, "layer_norm": 3}
"""Where an operator's bias stands among its tensor inputs: its value is not needed in the backward pass."""


def needed_in_backward(graph: Graph, op: Op, tensor: str) -> bool:
    """Whether a parameter's value is used again in the backward pass of a reader."""
    name = op.target.split(".")[1]
    position = op.inputs.index(tensor)
    if name in _KEEPS_NOTHING or name == "embedding" or _BIASED.get(name) == position:
        return False
    return graph.training and any(graph.tensors[other].grad for other in op.inputs if other != tensor)


def is_saved(graph: Graph, rules: Mapping[str, OpRules], tensor: str, depth: int = 0) -> bool:
    """Whether autograd keeps this tensor (or a view of it) for some reader's backward."""
    for op in graph.consumers[tensor]:
        if not op.grad:
            continue
        if rules[op.name].kind == "view":
            if depth < 8 and any(o is not None and is_saved(graph, rules, o, depth + 1) for o in op.outputs):
                return True
        elif any(o is not None and graph.tensors[o].grad for o in op.outputs) and _keeps_inputs(op):
            return True
    return False


def _keeps_inputs(op: Op) -> bool:
    return op.target.split(".")[1] not in _KEEPS_NOTHING
