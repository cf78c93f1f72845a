"""How a call is written and how the plan's call was written are two things: positions and keywords are exchanged.

A loop may give by keyword what the example gave by position, leave out what the example gave as its default, or give
a default that the example left out. :class:`Calling` writes such a call the way the graph was captured; a :class:`Form` is
one way of writing it that was met, so that the next call like it is recognised at once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright._torch_compat import (
    flatten_tree,
    flatten_with_paths,
    load_tree,
    names_in_tree,
    tree_runs_nothing,
    unflatten_tree,
)
from shardwright.errors import RunError
from shardwright.frontend.containers import restored_tree
from shardwright.graph import Atom, Graph

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Calling:
    """``names`` are those of the parameters that may be given by position; the captured call gave the first
    ``positional`` of them so, and ``keywords`` by name."""

    names: tuple[str, ...]
    positional: int
    keywords: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(forward: Callable[..., Any], graph: Graph) -> Calling:
        """The way in which ``forward`` was called when the graph was captured.

        >>> Calling(("x", "mask"), 1, (), {"mask": None}).arranged((), {"x": 1, "mask": None})
        ((1,), {})
        """
        args, kwargs = _skeleton(graph)
        found = inspect.signature(forward).parameters.values()
        by_position = (p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        defaults = {p.name: p.default for p in found if p.default is not p.empty}
        return Calling(tuple(p.name for p in by_position), len(args), tuple(kwargs), defaults)

    def arranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call as the captured one was written; what has no place there stays a keyword, to be refused by name."""
        if (len(args) == self.positional and tuple(kwargs) == self.keywords) or len(args) > len(self.names):
            return args, kwargs
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        wanted = (*self.names[: self.positional], *self.keywords)
        for name in wanted:
            if name not in given and name in self.defaults:
                given[name] = self.defaults[name]
        if self.positional > len(self.names) or not all(name in given for name in self.names[: self.positional]):
            return args, kwargs
        arranged = tuple(given.pop(name) for name in self.names[: self.positional])
        ordered = {name: given.pop(name) for name in self.keywords if name in given}
        return arranged, ordered | {name: value for name, value in given.items() if not self._idle(name, value)}

    def plainest(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call by keywords alone, without what says nothing: the same for every way of writing it.

        >>> Calling(("x", "mask"), 1, (), {"mask": None}).plainest((1, None), {})
        ((), {'x': 1})
        """
        if len(args) > len(self.names):
            return args, kwargs
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        return (), {name: given[name] for name in sorted(given) if not self._idle(name, given[name])}

    def by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument of a call, whichever way it is written; those that may be given by position by that, too."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        return given | {str(place): given[name] for place, name in enumerate(self.names) if name in given}

    def argument(self, path: str) -> str:
        """The place of a leaf in a call, whichever way it is written: ``[0][1]`` and ``[1]['mask']`` are ``mask``."""
        position = re.fullmatch(r"\[0\]\[(\d+)\](.*)", path)
        if position is not None and int(position.group(1)) < len(self.names):
            return self.names[int(position.group(1))] + position.group(2)
        keyword = re.fullmatch(r"\[1\]\['(\w+)'\](.*)", path)
        return path if keyword is None else keyword.group(1) + keyword.group(2)

    def _idle(self, name: str, value: Any) -> bool:
        """Whether an argument that the captured call lacked says nothing: it is what it is anyway."""
        if name not in self.defaults or isinstance(value, torch.Tensor):
            return False
        default = self.defaults[name]
        return value is default or bool(value == default)


def refuse_autocast(device: torch.device) -> None:
    """Pieces of operators would be cast otherwise than the operators."""
    if torch.is_autocast_enabled(device.type):
        raise RunError(
            "The module is called under torch.autocast, and was captured without: pieces of operators would be cast "
            "otherwise than the operators.",
            "Plan the model in the lower precision and call parallelize(model, plan, compute_dtype=torch.bfloat16), "
            "which keeps float32 masters; leave the call out of autocast.",
        )


def refuse_compiler_options(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if args or kwargs:
        given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        raise RunError(
            f"model.compile({given}): a parallelized module is compiled region by region, which has no options.",
            "Call model.compile(), or torch.compile(model, ...) for the whole program at once.",
        )


def refuse_other_mode(training: bool, planned: bool) -> None:
    """A model that draws numbers or changes buffers is another one in the other mode."""
    if training != planned:
        mode = "training" if planned else "evaluation"
        raise RunError(
            f"The plan was made for {mode} mode and the model behaves otherwise in the other one.",
            f"Call model.{'train' if planned else 'eval'}(), or plan the model in the other mode too.",
        )


@dataclass(frozen=True, eq=False)
class Form:
    """One way of writing a call of one kind: its tree, where its tensors are (in the order of the graph) and what they are
    like, its plain values."""

    spec: Any
    tensors: tuple[tuple[int, str | None, torch.Size, torch.dtype], ...]
    plain: tuple[tuple[int, Any], ...]
    modes: tuple[bool, ...]

    @staticmethod
    def of(calling: Calling, graph: Graph, args: Any, kwargs: Any, modes: tuple[bool, ...]) -> Form:
        """The form of a call that runs ``graph``."""
        names = {calling.argument(entry.path): entry.tensor for entry in graph.inputs}
        order = {name: number for number, name in enumerate(graph.sources)}
        tensors, plain = [], []
        for place, (path, leaf) in enumerate(flatten_with_paths((args, kwargs))):
            if isinstance(leaf, torch.Tensor):
                tensors.append((place, names.get(calling.argument(path)), leaf.shape, leaf.dtype))
            else:
                plain.append((place, leaf))
        tensors.sort(key=lambda entry: order.get(entry[1] or "", -1))
        return Form(flatten_tree((args, kwargs))[1], tuple(tensors), tuple(plain), modes)

    def fits(self, spec: Any, leaves: Sequence[Any], modes: tuple[bool, ...]) -> bool:
        if modes != self.modes or len(leaves) != len(self.tensors) + len(self.plain) or spec != self.spec:
            return False
        return all(
            isinstance(leaf := leaves[place], torch.Tensor) and leaf.shape == shape and leaf.dtype == dtype
            for place, _, shape, dtype in self.tensors
        ) and all(_same(leaves[place], value) for place, value in self.plain)

    def tensors_of(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The tensors of such a call by the names of the graph."""
        return {name: leaves[place] for place, name, _, _ in self.tensors if name is not None}


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one is other or bool(one == other))


def _skeleton(graph: Graph) -> Call:
    tree = restored_tree(graph.input_tree)
    return unflatten_tree([None] * len(graph.inputs), tree)


def example(graph: Graph) -> Call:
    """Stand-ins for the call that a graph was captured with, on the meta device; plain values as they were.

    Nothing is imported for it: a plan may come from anywhere.
    """
    leaves: list[Any] = []
    for entry in graph.inputs:
        meta = graph.tensors[entry.tensor] if entry.tensor is not None else None
        dtype = None if meta is None else getattr(torch, meta.dtype)
        leaves.append(entry.value if meta is None else torch.empty(meta.shape, dtype=dtype, device="meta"))
    try:
        unknown = names_in_tree(graph.input_tree)
        what = f"a {min(unknown)}" if unknown else "an object"
        if not unknown and tree_runs_nothing(graph.input_tree):
            what = "a dtype or device" if any(isinstance(entry.value, Atom) for entry in graph.inputs) else ""
        if not what:
            args, kwargs = unflatten_tree(leaves, load_tree(graph.input_tree))
            return tuple(args), dict(kwargs)
    except Exception:  # text from a file, read by pytree and by the user's own classes
        what = "something damaged"
    raise RunError(
        f"The plan was made for a call with {what} among its arguments, which cannot be rebuilt from the plan alone.",
        "Pass example inputs: parallelize(model, plan, args, kwargs).",
    )
