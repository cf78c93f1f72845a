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

from shardwright._torch_compat import flatten_with_paths
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


def local_part(name: str, leaf: Tensor, layout: Layout, place: Place, device: torch.device) -> Tensor:
    """This rank's part of an input, on its device."""
    if isinstance(leaf, DTensor):
        if tuple(leaf.placements) != tuple(layout):
            raise RunError(
                f"Input {name} arrives as a DTensor with {tuple(leaf.placements)}; the plan keeps it as {layout}.",
                "Give the whole tensor, or lay the DTensor out as the plan does.",
            )
        return leaf.to_local()
    return cut(leaf, layout, place).to(device)


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
