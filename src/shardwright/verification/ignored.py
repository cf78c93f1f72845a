"""Labels to be ignored, put into a batch that has none: a mean over labels is only tested where ranks have unequal numbers.

Real batches are padded, and a cross entropy divides by the number of labels that count. Where a model's integer input goes
nowhere but into the labels of such losses (through views, slices and pads), some of its entries become the losses'
``ignore_index``, more of them at the front, so that every cut leaves unequal numbers on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright._torch_compat import flatten_tree, flatten_with_paths, unflatten_tree
from shardwright.graph import Graph, Op, Ref
from shardwright.operators import analyse, record

_TARGET, _IGNORE, _USUAL = 1, 4, -100


def with_ignored_labels(
    graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """The inputs with some labels ignored, and a sentence that says so (empty where nothing was changed)."""
    labels = {
        entry.path: ignored for entry in graph.inputs if (ignored := ignored_value(graph, entry.tensor)) is not None
    }
    leaves, spec = flatten_tree((tuple(args), dict(kwargs)))
    paths = [path for path, _ in flatten_with_paths((tuple(args), dict(kwargs)))]
    changed = 0
    for place, path in enumerate(paths):
        if path in labels and leaves[place].numel() > 1 and not bool((leaves[place] == labels[path]).any()):
            leaves[place] = _with_holes(leaves[place], labels[path])
            changed += int((leaves[place] == labels[path]).sum())
    new_args, new_kwargs = unflatten_tree(leaves, spec)
    note = f"{changed} labels are ignored ones, so that their numbers differ between the ranks" if changed else ""
    return new_args, new_kwargs, note


def ignored_value(graph: Graph, tensor: str | None) -> int | None:
    """The ``ignore_index`` of the losses that alone read a tensor, as their labels; ``None`` if it has any other use."""
    if tensor is None or "int" not in graph.tensors[tensor].dtype or not graph.consumers[tensor]:
        return None
    found: set[int] = set()
    for op in graph.consumers[tensor]:
        known = record(op.target)
        if known.loss == "classes" and op.args[_TARGET] == Ref(tensor) and op.inputs.count(tensor) == 1:
            found.add(_ignore_index(op))
        elif known.fill is not None or analyse(op, graph.tensors).kind in ("view", "copy"):
            values = [ignored_value(graph, result) for result in op.outputs if result is not None]
            if any(value is None for value in values) or (
                known.fill is not None and _fill(op, known.fill) not in values
            ):
                return None
            found |= {value for value in values if value is not None}
        else:
            return None
    return found.pop() if len(found) == 1 else None


def _ignore_index(op: Op) -> int:
    value = op.args[_IGNORE] if len(op.args) > _IGNORE else op.kwarg("ignore_index", _USUAL)
    assert isinstance(value, int)
    return value


def _fill(op: Op, at: int) -> Any:
    """What a pad pads with."""
    value = op.args[at] if len(op.args) > at else op.kwarg("value", 0)
    return int(value) if isinstance(value, int | float) else value


def _with_holes(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    count = labels.numel()
    dice = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    holes = dice < 0.6 * (1 - torch.arange(count) / count)
    holes[0], holes[-1] = True, False
    return labels.masked_fill(holes.view(labels.shape), ignored)
