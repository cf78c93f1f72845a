"""Gradients on their way between replicas: one flat tensor per bucket of the program, filled, summed in place, handed out.

The flat tensor lives from step to step, and what is handed out to the optimizer are views of it. A bucket whose members got
no gradient in a step (the caller went back from some results only) is not summed; of one that is filled in part, the rest
is zero and not handed out. Both are the same on every rank, because every rank runs the same program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import (
    accumulation_hooks,
    gather_into,
    gradient_hooks,
    group_named,
    has_hooks,
    like_dtensor,
    local_of,
    scatter_into,
)
from shardwright.errors import RunError
from shardwright.lowering.collectives import ledger
from shardwright.program import Bucket
from shardwright.program.steps import BoundStep, Line
from shardwright.program.sums import Leg
from shardwright.runtime.uneven import Uneven, show_uneven
from shardwright.waiting import wait_for


class SideStream:
    """The stream beside the computation's, made when it is first needed."""

    def __init__(self) -> None:
        self._stream: Any = None

    def __call__(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)


class BucketReduction:
    """A flat tensor being summed between replicas, in place, one leg after the other; ``lines`` gives the ranks along every
    mesh axis.

    A scatter leaves this rank's piece where it lies in the flat tensor and a gather fills in the others', which NCCL and
    gloo both do without a copy. On CUDA all but the first leg are issued from a stream of their own, so that waiting for the
    leg before holds up neither the host nor the computation; elsewhere the host waits.
    """

    def __init__(self, flat: Tensor, legs: Sequence[Leg], lines: Sequence[Line], aside: SideStream) -> None:
        # Complex numbers travel as pairs; their scatters cut between numbers, so between pairs too.
        real = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        self._pieces, self._legs, self._lines, self._aside = [real], deque(legs), lines, aside
        self._work: Any = None

    def advance(self) -> None:
        """Start the next leg, if there is one, as soon as the one before has ended."""
        if not self._legs:
            return
        if self._work is None:
            self._work = self._start(self._legs.popleft())
            return
        with self._aside(self._pieces[0].device):
            wait_for(self._work)
            self._work = self._start(self._legs.popleft())

    def finish(self) -> None:
        """Start what is left and wait for all of it."""
        while self._legs:
            self.advance()
        wait_for(self._work)

    def _start(self, leg: Leg) -> Any:
        line, pieces = self._lines[leg.axis], self._pieces
        group = group_named(line.group)
        if leg.kind == "all_gather":
            mine = pieces.pop()
            work = gather_into(pieces[-1], mine, group)
        elif leg.kind == "reduce_scatter":
            pieces.append(pieces[-1].chunk(line.size)[line.position])
            work = scatter_into(pieces[-1], pieces[-2], group)
        else:
            work = dist.all_reduce(pieces[-1], group=group, async_op=True)
        record = ledger()
        if record is not None:
            larger = pieces[-2] if leg.kind == "reduce_scatter" else pieces[-1]
            record.record(BoundStep(leg.kind, line), larger, larger)
        return work


def deposit(parameter: torch.nn.Parameter, gradient: Tensor) -> None:
    """Add a finished local gradient to ``parameter.grad``, past the parameter's hooks."""
    for hook in gradient_hooks(parameter):
        gradient = gradient.to(parameter.dtype)
        gradient = _returned(parameter, hook(wrapped(parameter, gradient)), gradient)
    if parameter.grad is not None:
        local_of(parameter.grad).add_(gradient)
    else:
        parameter.grad = wrapped(parameter, gradient.to(parameter.dtype))
    for hook in accumulation_hooks(parameter):
        hook(parameter)


def _returned(parameter: torch.nn.Parameter, answer: Tensor | None, gradient: Tensor) -> Tensor:
    """What a hook makes of a local gradient."""
    if answer is None:
        return gradient
    if isinstance(answer, DTensor) != isinstance(parameter, DTensor) or answer.shape != parameter.shape:
        raise RunError(
            f"A hook of a parameter {list(parameter.shape)} returned a {type(answer).__name__} {list(answer.shape)}.",
            "Return the gradient it was given, changed: a DTensor of the same shape.",
        )
    if isinstance(answer, DTensor) and isinstance(parameter, DTensor):
        answer = answer.redistribute(placements=parameter.placements)
    return local_of(answer)


def wrapped(parameter: torch.nn.Parameter, gradient: Tensor) -> Tensor:
    """A local gradient laid out as the parameter is."""
    if not isinstance(parameter, DTensor):
        return gradient
    made = like_dtensor(gradient, parameter)
    if isinstance(parameter, Uneven):
        show_uneven(made, parameter.place)
    return made


class FlatBucket:
    """The flat tensor of one bucket. ``lines`` gives the ranks along every mesh axis, ``held`` the parameter of a name."""

    def __init__(
        self, bucket: Bucket, lines: Sequence[Line], aside: SideStream, held: Callable[[str], torch.nn.Parameter]
    ) -> None:
        self.bucket, self.lines, self.aside, self.held = bucket, lines, aside, held
        self.filled: dict[str, Tensor] = {}
        self._flat: Tensor | None = None
        self._parts: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}
        self._reduction: BucketReduction | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._flat is None else self._flat.nbytes

    def fill(self, tensor: str, gradient: Tensor) -> None:
        """Take a gradient. Memory in which the last step's gradients still live is left to them."""
        if not self.filled:
            in_use = any(self.held(name).grad is given for name, given in self._given.items())
            if in_use or self._flat is None or self._flat.dtype != gradient.dtype:
                self._allocate(gradient.dtype, gradient.device)
        assert self._flat is not None
        if tensor not in self._parts:
            start = self._starts[tensor]
            part = self._flat[start : start + gradient.numel()].view(gradient.shape)
            self._parts[tensor], self._given[tensor] = part, wrapped(self.held(tensor), part)
        self.filled[tensor] = self._parts[tensor].copy_(gradient)

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.zeros(self.bucket.way.elements, dtype=dtype, device=device)
        starts = [sum(self.bucket.elements[:i]) for i in range(len(self.bucket.elements))]
        self._starts = dict(zip(self.bucket.tensors, starts, strict=True))
        self._parts, self._given = {}, {}

    def move(self) -> None:
        """Take new memory, wherever the allocator now takes it from."""
        if self._flat is not None and not self.filled:
            self._allocate(self._flat.dtype, self._flat.device)

    def release(self) -> None:
        """Let go of the memory; gradients that were handed out keep theirs, those on their way are not touched."""
        if not self.filled:
            self._flat, self._parts, self._given = None, {}, {}

    def abandon(self) -> None:
        """Forget a pass that broke off: what it filled, and the sum that it had begun."""
        self.filled.clear()
        self._reduction = None
        self.release()

    def given(self, tensor: str) -> Tensor | None:
        """What a parameter is handed as its gradient."""
        return self._given.get(tensor)

    def advance(self) -> None:
        """Start the next leg of the sum."""
        if self._reduction is None:
            if not self.filled:
                return
            assert self._flat is not None
            for tensor in self.bucket.tensors:
                if tensor not in self.filled and tensor in self._parts:
                    self._parts[tensor].zero_()
            self._reduction = BucketReduction(self._flat, self.bucket.way.legs, self.lines, self.aside)
        self._reduction.advance()

    def finish(self) -> None:
        """Wait for the sum."""
        if self._reduction is not None:
            self._reduction.finish()
            self._reduction = None

    def hand_out(self, tensor: str) -> None:
        """Give a parameter its gradient, if there was one in this step."""
        part, parameter = self.filled.pop(tensor, None), self.held(tensor)
        if part is None:
            return
        if has_hooks(parameter):  # who knows where the hooks take it: the bucket's memory is used again
            deposit(parameter, part.clone())
        elif parameter.grad is None and part.dtype == parameter.dtype:
            parameter.grad = self._given[tensor]
        else:
            deposit(parameter, part)
