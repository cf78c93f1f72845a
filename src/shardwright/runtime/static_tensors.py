"""Tensors that recorded passes read and write where they lie: which buffers they may write over, and how gradients lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.graph import refs
from shardwright.operators import record
from shardwright.program import Program


def updated_in_place(program: Program) -> list[tuple[int, int]]:
    """The buffers that a recording may write over itself, by their place among the sources and the new value: running
    statistics and counts, whose old values nothing but the new ones depends on."""
    flow, graph = program.flow, program.graph
    made_by = {name: op for op in graph.ops for name in op.outputs}
    found = []
    for name, value in flow.mutations:
        new = flow.values[value].tensor
        readers = [op for op in graph.ops if name in op.inputs]
        alone = all(record(op.target).only_updates or op.outputs == (new,) for op in readers)
        if alone and made_by.get(new) in readers and new not in {ref.name for ref in refs(graph.outputs)}:
            found.append((graph.sources.index(name), value))
    return found


class TensorPool:
    """Tensors that several passes use in turn."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A copy of a tensor where nobody needs what is there."""
        strides = torch.empty_like(like, device="meta").stride()
        free = self._free.get((like.shape, strides, like.dtype))
        return free.pop().copy_(like) if free else like.clone()

    def give(self, taken: Iterable[Tensor]) -> None:
        for x in taken:
            self._free.setdefault((x.shape, x.stride(), x.dtype), []).append(x)


def laid_out_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the dtype and the order of its parameter, as fused optimizers want it."""
    if gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def into(known: dict[Any, Any], key: Any, x: Tensor | None) -> None:
    """What a recording wrote: where recordings are done again by Python, the new values go where the first ones lie."""
    if known.get(key) is not None and x is not None:
        known[key].copy_(x)
    else:
        known[key] = x
