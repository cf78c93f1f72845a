"""What needs all rows of a batch together: computed once the micro-batches are through, by every rank for itself.

The operators after which nothing with weights comes (a contrast between rows, the balance of experts) are small, and every
rank has what the micro-batches gave. So each computes them as one process would, autograd leads their gradients back to the
outputs of the micro-batches, and nothing travels but single numbers: parameters without dims, from a rank that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.frontend.replay import values_of
from shardwright.graph import Ref
from shardwright.program.pipeline import Pipeline


class Tail:
    """The operators of a pipeline that run after its micro-batches."""

    def __init__(
        self, pipeline: Pipeline, buffers: Mapping[str, Tensor], held: Callable[[str], Any], device: torch.device
    ) -> None:
        """``held`` finds a parameter that this rank holds by the name of its tensor."""
        graph = pipeline.micro.tail
        assert graph is not None
        self.graph, self._buffers, self._held, self._device = graph, buffers, held, device
        read = {name for op in graph.ops for name in op.inputs}
        self._owners: dict[str, list[int]] = {}
        for number, part in enumerate(next(iter(pipeline.parts.values()))):
            for parameter in part.graph.parameters:
                if parameter.tensor in read:
                    self._owners.setdefault(parameter.tensor, []).extend(pipeline.stages[number].ranks)

    def outputs(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of the model that the micro-batches did not give, from what they gave and what the call brought."""
        known = {**self._buffers, **values, **{name: self._parameter(name) for name in self._owners}}
        found = values_of(self.graph, known, self._device)
        return {out.name: found[out.name] for out in self.graph.outputs if isinstance(out, Ref)}

    def _parameter(self, name: str) -> Tensor:
        """A parameter: this rank's own, where it holds it and autograd is to find it; everywhere the same number."""
        owners, meta = self._owners[name], self.graph.tensors[name]
        mine = None
        if dist.get_rank() in owners:
            held = self._held(name)
            mine = held.full_tensor() if isinstance(held, DTensor) else held
        sent = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=self._device)
        if mine is not None:
            sent.copy_(mine.detach())
        dist.broadcast(sent, owners[0])
        return sent if mine is None else mine
