"""The arguments of a call, matched with those the graph was captured with, and each rank's part of them.

Every rank is given the whole batch and takes its own part, so a training script needs no change; or it is given its part
alone, or a ``DTensor``. What does not match is an error that names the argument.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import flatten_with_paths
from shardwright.errors import RunError
from shardwright.frontend.gradients import with_input_gradients
from shardwright.graph import Graph
from shardwright.operators import record
from shardwright.program import Decisions
from shardwright.program.boundary import whole_layout
from shardwright.program.dataflow import Dataflow
from shardwright.runtime.boundary_steps import Bound, Inputs, input_steps

_KEY = re.compile(r"\[(?:'((?:[^'\\]|\\.)*)'|(\d+))\]")


def matched(
    graph: Graph,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    """The tensors of a call by the graph's names; ``shapes`` are those of plain tensors where they are not whole.

    Raises
    ------
    RunError
        When an argument is missing, has another shape or dtype, or a plain value differs from the captured one.
    """
    given = dict(flatten_with_paths((args, dict(kwargs))))
    found: dict[str, Tensor] = {}
    for entry in graph.inputs:
        if entry.path not in given:
            raise RunError(
                f"The call lacks the argument {readable(entry.path)} that the plan was made with.",
                f"Call the model with {', '.join(readable(i.path) for i in graph.inputs)}.",
            )
        leaf = given.pop(entry.path)
        if entry.tensor is None:
            if leaf != entry.value and not isinstance(leaf, Tensor):
                raise RunError(
                    f"The argument {readable(entry.path)} is {leaf!r}; the plan was made with {entry.value!r}.",
                    "Plain values are fixed by the plan; plan again with the new one.",
                )
            continue
        expected = graph.tensors[entry.tensor]
        dtype = str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else type(leaf).__name__
        local = shapes is not None and not isinstance(leaf, DTensor)
        wanted = shapes[entry.tensor] if shapes is not None and local else expected.shape
        if not isinstance(leaf, Tensor) or tuple(leaf.shape) != wanted or dtype != expected.dtype:
            shape = list(leaf.shape) if isinstance(leaf, Tensor) else ""
            raise RunError(
                f"The argument {readable(entry.path)} is {dtype}{shape}; "
                f"the plan was made for {expected.dtype}{list(wanted)}{' on this rank' if local else ''}.",
                "Shapes are fixed by the plan: pad or drop the last incomplete batch, or plan for this shape.",
            )
        found[entry.tensor] = leaf
    if extra := [path for path, leaf in given.items() if leaf is not None]:
        raise RunError(
            f"The call has the argument {readable(extra[0])}, which the plan was made without.",
            "Call the model as it was captured, or plan again.",
        )
    return found


class Arguments:
    """The arguments of calls that are alike, and the way that each takes to where the plan keeps it."""

    def __init__(
        self,
        flow: Dataflow,
        decisions: Decisions,
        device: torch.device,
        bound: Bound,
        inputs: Inputs,
        received: Collection[str] = (),
    ) -> None:
        """``received`` are inputs that no call brings: another stage sends them, lying as they are kept."""
        self._resting, self._device = flow.strategy.resting, device
        self._mesh_shape = flow.place.sizes
        self._without_gradient = _without_gradient(flow.graph)
        self._images = _images(flow.graph) if device.type == "cuda" else set()
        names = [entry.tensor for entry in flow.graph.inputs if entry.tensor is not None]
        resting = flow.strategy.resting
        self.as_kept = {name: input_steps(flow, decisions, name, resting[name], bound) for name in names}
        """Of inputs that lie as the plan keeps them: on the way back their gradients are summed between ranks that hold the
        same."""
        self._crossings = self.as_kept
        self.shapes: dict[str, tuple[int, ...]] | None = None
        if inputs == "local":
            self.shapes = {name: flow.local_shape(name, resting[name]) for name in names}
        else:
            self._crossings = {
                name: input_steps(flow, decisions, name, whole_layout(resting[name]), bound)
                for name in names
                if name not in received
            }

    @property
    def lays(self) -> bool:
        """Whether any of them is computed with in another order than it comes in."""
        return bool(self._images)

    def part(self, name: str, leaf: Tensor) -> Tensor:
        """This rank's part of an input, on its device; its gradient goes back to where the input lies."""
        if name in self._without_gradient:
            leaf = leaf.detach()  # or else the way back would make zeros of the gradient that is not there
        if isinstance(leaf, DTensor):
            layout, mesh = tuple(self._resting[name]), tuple(leaf.device_mesh.shape)
            if mesh != self._mesh_shape:
                raise RunError(
                    f"Input {name} arrives as a DTensor on a mesh of shape {mesh}; the plan's is {self._mesh_shape}.",
                    "Give the whole tensor, or a DTensor on the mesh of the parallelized module (module.mesh).",
                )
            if tuple(leaf.placements) != layout:
                leaf = leaf.redistribute(placements=layout)
            return self.as_kept[name](leaf.to_local(grad_placements=layout))
        if leaf.requires_grad:  # gradients meet on the device that they are computed on
            leaf = leaf.to(self._device)
        return self._crossings[name](leaf).to(self._device)

    def laid(self, name: str, part: Tensor) -> Tensor:
        """A part in the order in which it is computed with."""
        return part.contiguous(memory_format=torch.channels_last) if name in self._images else part


def _images(graph: Graph) -> set[str]:
    """Inputs in halves that convolutions over height and width read. Channels last is how the fast kernels of CUDA want
    them, and whatever is computed from them then lies so too: else every convolution would turn its input and result."""
    read = {op.inputs[0] for op in graph.ops if record(op.target).channels_last}
    given = [graph.tensors[entry.tensor] for entry in graph.inputs if entry.tensor in read]
    return {x.name for x in given if len(x.shape) == 4 and x.dtype in ("bfloat16", "float16")}


def _without_gradient(graph: Graph) -> set[str]:
    """Inputs from which no gradient comes back though they be asked for one: a teacher's, under ``torch.no_grad``; numbers
    that are only sorted, or rounded to codes."""
    given = [entry.tensor for entry in graph.inputs if entry.tensor is not None]
    asked = with_input_gradients(graph, given).tensors
    return {name for name in given if not asked[name].grad}


def example_of(inputs: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Stand-ins for a call, from the paths, dtypes and shapes that a plan remembers (on the meta device)."""
    args: dict[int, Any] = {}
    kwargs: dict[str, Any] = {}
    for path, dtype, shape in inputs:
        keys = [int(number) if number else name for name, number in _KEY.findall(path)]
        if len(keys) != 2 or "".join(m.group(0) for m in _KEY.finditer(path)) != path:
            raise RunError(
                f"The plan's input {path} is nested, so the call cannot be rebuilt from the plan alone.",
                "Pass example inputs: parallelize(model, plan, args, kwargs).",
            )
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        (args if keys[0] == 0 else kwargs)[keys[1]] = tensor  # type: ignore[index]  # ints and names by their kind
    if sorted(args) != list(range(len(args))):
        raise RunError(
            "The plan's positional inputs have gaps (plain values between tensors).",
            "Pass example inputs: parallelize(model, plan, args, kwargs).",
        )
    return tuple(args[i] for i in range(len(args))), kwargs


def readable(path: str) -> str:
    """``[1]['labels']`` is the keyword ``labels``; ``[0][2]`` the third positional argument."""
    keyword = re.fullmatch(r"\[1\]\['(\w+)'\](.*)", path)
    if keyword:
        return keyword.group(1) + keyword.group(2)
    position = re.fullmatch(r"\[0\]\[(\d+)\](.*)", path)
    return f"#{int(position.group(1)) + 1}{position.group(2)}" if position else path
