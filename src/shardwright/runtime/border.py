"""Where tensors enter and leave a parallelized module, and their gradients the other way.

One rule holds at the border, for whole tensors, local parts and DTensors alike: **a gradient lies as its tensor does.**
Along a mesh axis where every rank holds the same tensor, every rank holds (and must bring) the same gradient; along one
where each holds a part, each holds the gradient of its part. Inside the module gradients are dual (docs/architecture.md), so
an input's gradient goes from the dual of the layout that the plan keeps it in to the layout it came in, and a result's from
the layout it was handed out in back to the one it was computed in (the emitted program shares it out between replicas).

Results that are cut are handed out whole by default, put together when first used (as PyTorch's own asynchronous
collectives are awaited when first used): a loop that never looks at the logits pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwright._torch_compat import map_tree, wrapper_tensor
from shardwright.lowering.collectives import convert, run_steps
from shardwright.operators.rules import Layout
from shardwright.program import Decisions
from shardwright.program.border import arriving, leaving
from shardwright.program.dataflow import Dataflow
from shardwright.program.steps import BoundStep

Inputs = Literal["whole", "rows", "local"]
"""What plain tensors given to the module are: the whole batch, the same on every rank, this rank's rows of it, or each
rank's part as the plan cuts it."""
Outputs = Literal["whole", "local", "dtensor"]
"""What the module hands out where a result is cut: whole tensors, each rank's part, or DTensors."""

Bound = Callable[[tuple[BoundStep, ...]], tuple[BoundStep, ...]]


class Crossing(NamedTuple):
    """The steps that a tensor takes over the border, and those that its gradient takes back."""

    forward: tuple[BoundStep, ...]
    backward: tuple[BoundStep, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        return convert(tensor, self.forward, self.backward) if self.forward or self.backward else tensor


def entrance(flow: Dataflow, decisions: Decisions, tensor: str, outside: Layout, bound: Bound) -> Crossing:
    """From the layout that an input is given in to the one that the plan keeps it in."""
    forward, backward = arriving(flow, decisions, tensor, outside)
    return Crossing(bound(forward), bound(backward))


def departure(flow: Dataflow, decisions: Decisions, value: int, bound: Bound) -> Crossing:
    """From the layout of a result, with nothing left to be summed, to the whole tensor."""
    forward, backward = leaving(flow, decisions, value)
    return Crossing(bound(forward), bound(backward))


class Whole(Tensor):
    """A result that is cut between the ranks, as the whole tensor that loops expect.

    It has the whole shape; the first operator that looks at its values gathers them, so every rank has to look. What
    operators make of it are plain tensors.
    """

    _local: Tensor
    _steps: tuple[BoundStep, ...]
    _gathered: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, steps: tuple[BoundStep, ...], shape: tuple[int, ...]) -> Whole:
        made = wrapper_tensor(cls, shape, local)
        made._local, made._steps, made._gathered = local, steps, None
        return made

    def whole(self) -> Tensor:
        """The values, outside of autograd."""
        if self._gathered is None:
            self._gathered = run_steps(self._local, self._steps)
            del self._local
        return self._gathered

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # as in Tensor, without types
        given: dict[int, Whole] = {}

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, Whole):
                return leaf
            given[id(leaf.whole())] = leaf
            return leaf.whole()

        result = func(*map_tree(plain, args), **map_tree(plain, kwargs or {}))
        return given.get(id(result), result)  # an operator in place hands back what it was given

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            return super().numpy()  # says that it has to be detached
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __repr__(self) -> Any:  # type: ignore[override]  # the keyword is for subclasses that print their parts
        return f"Whole({self.whole()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, crossing: Crossing, shape: tuple[int, ...]) -> Tensor:
        ctx.back = crossing.backward
        return Whole(local.detach(), crossing.forward, shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return run_steps(gradients[0], ctx.back), None, None


def handed_out(local: Tensor, crossing: Crossing, shape: tuple[int, ...]) -> Tensor:
    """A result that is put together when it is used."""
    return _HandOut.apply(local, crossing, shape) if local.requires_grad else Whole(local, crossing.forward, shape)
