"""The arguments of a call, matched with those the graph was captured with, and each rank's part of them.

Every rank is given the whole batch (or a ``DTensor`` that already lies as the plan wants it) and takes its own part, so a
training script needs no change. What does not match is an error that names the argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardwright._torch_compat import flatten_tree, flatten_with_paths
from shardwright.errors import RunError
from shardwright.graph import Graph
from shardwright.lowering.bind import Place
from shardwright.operators.rules import Layout, nested_chunk

_KEY = re.compile(r"\[(?:'((?:[^'\\]|\\.)*)'|(\d+))\]")


def regions(shape: Sequence[int], layout: Layout, place: Place) -> list[tuple[int, int]]:
    """``[start, stop)`` per dim of the part that one rank holds."""
    cuts: dict[int, list[tuple[int, int]]] = {}
    for placement, size, index in zip(layout, place.sizes, place.coordinate, strict=True):
        if isinstance(placement, Shard):
            cuts.setdefault(placement.dim, []).append((size, index))
    return [nested_chunk(extent, cuts.get(dim, ())) for dim, extent in enumerate(shape)]


def cut(tensor: Tensor, layout: Layout, place: Place) -> Tensor:
    """A view of one rank's part of a whole tensor."""
    for dim, (start, stop) in enumerate(regions(tensor.shape, layout, place)):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def matched(graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call by the graph's names.

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
        if not isinstance(leaf, Tensor) or tuple(leaf.shape) != expected.shape or dtype != expected.dtype:
            shape = list(leaf.shape) if isinstance(leaf, Tensor) else ""
            raise RunError(
                f"The argument {readable(entry.path)} is {dtype}{shape}; "
                f"the plan was made for {expected.dtype}{list(expected.shape)}.",
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
    """The arguments of calls that are alike: what was found out about the first saves work for those after it."""

    def __init__(self, graph: Graph, resting: Mapping[str, Layout], place: Place, device: torch.device) -> None:
        self._graph, self._resting, self._device = graph, resting, device
        self._spec: Any = None
        self._tensors: list[tuple[int, str, tuple[int, ...], torch.dtype]] = []
        self._plain: list[tuple[int, Any]] = []
        self._cuts: dict[str, list[tuple[int, int, int]]] = {}
        for entry in graph.inputs:
            if entry.tensor is not None:
                shape = graph.tensors[entry.tensor].shape
                spans = enumerate(regions(shape, resting[entry.tensor], place))
                cuts = [(dim, start, stop - start) for dim, (start, stop) in spans if stop - start != shape[dim]]
                self._cuts[entry.tensor] = cuts

    def matched(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """As :func:`matched`, at once where the call looks like the first one."""
        leaves, spec = flatten_tree((args, kwargs))
        if spec == self._spec and self._alike(leaves):
            return {name: leaves[place] for place, name, _, _ in self._tensors}
        found = matched(self._graph, args, kwargs)
        places = {path: place for place, (path, _) in enumerate(flatten_with_paths((args, dict(kwargs))))}
        self._tensors, plain = [], dict.fromkeys(range(len(leaves)))
        for entry in self._graph.inputs:
            place = places[entry.path]
            plain.pop(place)
            if entry.tensor is not None:
                leaf = leaves[place]
                self._tensors.append((place, entry.tensor, tuple(leaf.shape), leaf.dtype))
            elif not isinstance(leaves[place], Tensor):
                plain[place] = entry.value
        self._spec, self._plain = spec, list(plain.items())
        return found

    def _alike(self, leaves: list[Any]) -> bool:
        return all(
            isinstance(leaf := leaves[place], Tensor) and leaf.shape == shape and leaf.dtype == dtype
            for place, _, shape, dtype in self._tensors
        ) and all(not isinstance(leaves[place], Tensor) and leaves[place] == value for place, value in self._plain)

    def local(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's part of every input, on its device."""
        return [self._part(name, leaf) for name, leaf in inputs.items()]

    def _part(self, name: str, leaf: Tensor) -> Tensor:
        if isinstance(leaf, DTensor):
            layout = self._resting[name]
            if tuple(leaf.placements) != tuple(layout):
                raise RunError(
                    f"Input {name} arrives as a DTensor with {tuple(leaf.placements)}; the plan keeps it as {layout}.",
                    "Give the whole tensor, or lay the DTensor out as the plan does.",
                )
            return leaf.to_local()
        for dim, start, length in self._cuts[name]:
            leaf = leaf.narrow(dim, start, length)
        return leaf.to(self._device)


def example(inputs: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
