"""Where tensors enter and leave a parallelized module, and their gradients the other way.

One rule holds at the boundary, for whole tensors, local parts and DTensors alike: **a gradient lies as its tensor does.**
Along a mesh axis where every rank holds the same tensor, every rank holds (and must bring) the same gradient; along one
where each holds a part, each holds the gradient of its part. Inside the module gradients are dual (docs/architecture.md), so
an input's gradient goes from the dual of the layout that the plan keeps it in to the layout it came in, and a result's from
the layout it was handed out in back to the one it was computed in (the emitted program shares it out between replicas).

Results that are cut are handed out whole by default (:mod:`~shardwright.runtime.deferred_results`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from shardwright.lowering.collectives import convert
from shardwright.operators.rules import Layout
from shardwright.program import Decisions
from shardwright.program.boundary import arriving, leaving
from shardwright.program.dataflow import Dataflow
from shardwright.program.steps import BoundStep

Inputs = Literal["whole", "rows", "local"]
"""What plain tensors given to the module are: the whole batch, the same on every rank, this rank's rows of it, or each
rank's part as the plan cuts it."""
Outputs = Literal["whole", "local", "dtensor"]
"""What the module hands out where a result is cut: whole tensors, each rank's part, or DTensors."""

Bound = Callable[[tuple[BoundStep, ...]], tuple[BoundStep, ...]]


class BoundarySteps(NamedTuple):
    """The steps that a tensor takes over the boundary, and those that its gradient takes back."""

    forward: tuple[BoundStep, ...]
    backward: tuple[BoundStep, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        return convert(tensor, self.forward, self.backward) if self.forward or self.backward else tensor


def input_steps(flow: Dataflow, decisions: Decisions, tensor: str, outside: Layout, bound: Bound) -> BoundarySteps:
    """From the layout that an input is given in to the one that the plan keeps it in."""
    forward, backward = arriving(flow, decisions, tensor, outside)
    return BoundarySteps(bound(forward), bound(backward))


def output_steps(flow: Dataflow, decisions: Decisions, value: int, bound: Bound) -> BoundarySteps:
    """From the layout of a result, with nothing left to be summed, to the whole tensor."""
    forward, backward = leaving(flow, decisions, value)
    return BoundarySteps(bound(forward), bound(backward))
