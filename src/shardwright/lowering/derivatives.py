"""The backward of one operator on one rank, as a function of what it keeps and of the gradients that arrive.

Two ways. **Traced**: autograd is asked once, on tensors without data, which operators it would run (PyTorch's own derivative
formulas), and these are written down as plain functions: no graph is built in a step, nothing is kept but what they read,
and each gradient is computed only when its instruction comes. **Recorded**: where that cannot be done (exchanges between
ranks that gradients go back through, random numbers of a whole operator, operators that look at data), the operator runs
under autograd by itself, and its backward is one call of the engine; so are the first passes of every operator. Either way
inputs and results that the backward reads live in the program's values, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardwright.lowering.calls import Call
from shardwright.lowering.tracing import Traced, trace
from shardwright.program.dataflow import Compute
from shardwright.program.footprints import Strided

Tensors = Sequence[Tensor | None]


class Derivative(Protocol):
    """An operator that can be run forward and backward."""

    def forward(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], Any]:
        """The results, and what the backward needs beside them and the inputs."""

    def backward(
        self, own: Any, kept: Sequence[Tensor | None], gradients: Tensors, wanted: Sequence[int], last: bool
    ) -> list[Tensor | None]:
        """The gradients of these inputs. ``kept`` are inputs, then results, as far as they were kept; ``last``: nobody
        asks again."""


class _Hole(NamedTuple):
    """Stands for an input that is not kept but will be there again: which one, and how the saved tensor lies in it."""

    place: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Recorded:
    """By autograd, one operator at a time. ``like`` says how the inputs lie (those of the last pass, once there was one),
    ``kept`` which of them the program keeps for the backward (or brings back): of these autograd holds nothing."""

    def __init__(
        self, call: Call, slots: Sequence[int], like: Sequence[Strided], kept: Sequence[int], device: torch.device
    ) -> None:
        self.call, self.slots, self.like, self.device = call, tuple(slots), tuple(like), device
        self.kept = tuple(kept)
        self.lying: dict[int, tuple[int, ...]] = {}
        """The strides of the gradients that last arrived, by result."""

    def forward(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], Any]:
        self.like = tuple(
            like if like.strides == x.stride() else replace(like, strides=tuple(x.stride()))
            for like, x in zip(self.like, inputs, strict=True)
        )
        distinct: dict[int, Tensor] = {}
        for slot, x, like in zip(self.slots, inputs, self.like, strict=True):
            if slot not in distinct:
                distinct[slot] = x.detach().requires_grad_(like.grad)
        leaves = [distinct[slot] for slot in self.slots]
        holder: list[Sequence[Tensor | None]] = [()]
        holes = {inputs[i].untyped_storage().data_ptr(): i for i in self.kept if inputs[i].numel()}
        held: set[int] = set()

        def pack(saved: Tensor) -> Any:
            where = saved.untyped_storage().data_ptr()
            place = holes.get(where) if saved.numel() else None
            if place is None:
                held.add(where)
                return saved
            return _Hole(place, tuple(saved.shape), tuple(saved.stride()), int(saved.storage_offset()))

        def unpack(saved: Any) -> Tensor:
            there = holder[0][saved.place] if isinstance(saved, _Hole) else saved
            assert there is not None
            return there.as_strided(saved.size, saved.stride, saved.offset) if isinstance(saved, _Hole) else there

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            made = self.call(*leaves)
        results = tuple(x.detach() if isinstance(x, Tensor) else x for x in made)
        outputs = [get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else None for x in made]
        edges = [get_gradient_edge(x) if x.requires_grad else None for x in leaves]
        for leaf in distinct.values():
            # Autograd knows a leaf by itself, not by its values, and would keep its memory.
            if leaf.requires_grad and leaf.untyped_storage().data_ptr() not in held:
                leaf.data = leaf.new_empty(0)
        return results, (outputs, edges, holder)

    def backward(
        self, own: Any, kept: Sequence[Tensor | None], gradients: Tensors, wanted: Sequence[int], last: bool
    ) -> list[Tensor | None]:
        if own is None:  # not computed again in a recomputed block: of what was not kept only the shape matters
            pairs = zip(kept, self.like, strict=False)
            made_up = [_empty(like, self.device) if x is None else x for x, like in pairs]
            _, own = self.forward(made_up)
        outputs, edges, holder = own
        holder[0] = kept
        followed = [
            (edge, gradient)
            for edge, gradient in zip(outputs, gradients, strict=False)
            if gradient is not None and edge is not None
        ]
        if not followed:
            return [None] * len(wanted)
        self.lying = {i: tuple(g.stride()) for i, g in enumerate(gradients) if g is not None}
        roots, arrived = zip(*followed, strict=True)
        chosen = [edges[i] for i in wanted]
        found = torch.autograd.grad(roots, chosen, arrived, retain_graph=not last, allow_unused=True)
        holder[0] = ()
        return list(found)


class Lazy:
    """Recorded at first, traced when it has shown to be used again: tracing an operator takes as long as many steps of a
    small model. A pass that began one way ends that way."""

    def __init__(self, recorded: Recorded, make: Callable[[], Derivative | None]) -> None:
        self._now: Derivative = recorded
        self._make: Callable[[], Derivative | None] | None = make

    @property
    def way(self) -> Derivative:
        """How the next pass runs it."""
        return self._now

    @property
    def early(self) -> Traced | None:
        """The way, if part of it can be done before its turn."""
        return self._now if isinstance(self._now, Traced) and self._now.early_inputs is not None else None

    @property
    def traced(self) -> bool:
        return not isinstance(self._now, Recorded)

    def settle(self) -> None:
        """From the next pass on run what is traced, where it can be."""
        if self._make is not None:
            self._now, self._make = self._make() or self._now, None

    def forward(self, inputs: Sequence[Tensor], begun: Sequence[Tensor] | None = None) -> tuple[tuple[Any, ...], Any]:
        """``begun``: what :meth:`Traced.early` gave."""
        if begun is not None:
            assert isinstance(self._now, Traced)
            made, own = self._now.forward(inputs, begun)
        else:
            made, own = self._now.forward(inputs)
        return made, (self._now, own)

    def backward(
        self, own: Any, kept: Sequence[Tensor | None], gradients: Tensors, wanted: Sequence[int], last: bool
    ) -> list[Tensor | None]:
        if own is None:  # of a recomputed block, not computed again: what is traced needs no second forward
            self.settle()
        way, inner = (self._now, None) if own is None else own
        return way.backward(inner, kept, gradients, wanted, last)


def derivative(
    node: Compute,
    call: Call,
    like: Sequence[Strided],
    arriving: Sequence[int],
    returning: Sequence[int],
    device: torch.device,
) -> Lazy:
    """How to run a node forward and backward. ``arriving``: the results of which gradients come."""

    kept = sorted({*node.footprint.saved_inputs, *returning})
    recorded = Recorded(call, node.call.slots, like, kept, device)

    def make() -> Derivative | None:
        if node.rules.kind == "recurrent":
            return None
        return trace(node, call, recorded.like, arriving, returning, device, recorded.lying)

    return Lazy(recorded, make)


def _empty(like: Strided, device: torch.device) -> Tensor:
    return torch.empty_strided(like.shape, like.strides, dtype=getattr(torch, like.dtype), device=device)
