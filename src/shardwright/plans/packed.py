"""The captured graph inside a plan file: JSON, compressed, as one line of text.

With it a plan can be explained, simulated, drawn and planned again without its model, so that nobody has to run somebody
else's Python to look at a plan. What such a graph may make this process do is limited: pricing runs PyTorch's own operators
on small or on no data, so only operators that compute tensors from tensors are let in from a file. A custom
``autograd.Function`` (found by importing what the graph names), operators of other libraries, and those that read or write
files need the model itself, given by a person. Operators check their arguments themselves when they are called; but a name
that is no argument, a text where a number belongs or an argument given twice is a damaged or crafted file, and is said so
before anything is built of it.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from shardwright._torch_compat import is_operator, operator, schema
from shardwright.errors import GraphError, PlanError
from shardwright.graph import Atom, Graph, Op, Ref, Value, from_json, to_json
from shardwright.operators.record import record
from shardwright.records import shown

LARGEST = 1 << 26
"""Bytes of a graph's JSON; a plan of a larger one is written without it."""

NAMESPACES = ("aten", "prims")
REMEDY = "Give the model it was made for: --model MODEL."


def pack(graph: Graph) -> str | None:
    """The graph as one line of text; nothing where it is too large to be carried along."""
    text = to_json(graph).encode()
    return base64.b64encode(zlib.compress(text, 9)).decode() if len(text) <= LARGEST else None


def unpack(text: str, *, trusted: bool = False) -> Graph:
    """The graph that :func:`pack` wrote; unless it is ``trusted``, operators that could do more than compute are refused."""
    try:
        unpacked = zlib.decompressobj()
        data = unpacked.decompress(base64.b64decode(text, validate=True), LARGEST + 1)
        written = data.decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError, ValueError) as error:
        raise PlanError(f"The graph inside the plan is damaged: {error}.", "Plan again.") from None
    if len(data) > LARGEST or not unpacked.eof:
        raise PlanError("The graph inside the plan is incomplete or too large.", "Plan again.")
    try:
        graph = from_json(written)
        inside = [call for op in graph.ops if (performs := record(op.target).performs) for call in performs(op)]
    except GraphError as error:
        raise PlanError(f"The graph inside the plan is damaged: {error.message}", "Plan again.") from None
    if not trusted:
        for target, args, kwargs in [*((op.target, op.args, dict(op.kwargs)) for op in graph.ops), *inside]:
            _check_harmless(target, args, kwargs)
        for op in graph.ops:
            _check_outputs(op)
    return graph


def _check_outputs(op: Op) -> None:
    """As many results as the operator has; lists have as many as it takes."""
    returns = schema(op.target).returns
    if len(op.outputs) != len(returns) and not any(str(found.type).startswith("List") for found in returns):
        raise PlanError(
            f"The plan's graph has {len(op.outputs)} results of {op.name!r} ({op.target}), which gives {len(returns)}.",
            "Plan again.",
        )


def _check_harmless(target: str, args: tuple[Value, ...], kwargs: dict[str, Value]) -> None:
    """Refuse an operator that could do more than compute tensors, and arguments that it does not have."""
    from shardwright.frontend import ctc  # noqa: F401 - importing it registers its operator

    if target.partition(".")[0] not in NAMESPACES and not record(target).in_files:
        raise PlanError(
            f"The plan's graph calls {target!r}, which a plan may not bring along: it is not one of PyTorch's own.",
            REMEDY,
        )
    try:
        known = is_operator(operator(target))
    except (AttributeError, ValueError, RuntimeError):
        known = False
    if not known:
        raise PlanError(f"The plan's graph calls {target!r}, which this PyTorch does not have.", REMEDY)
    found = schema(target)
    arguments = [(argument.name, str(argument.type)) for argument in found.arguments]
    if found.is_mutable or not found.returns or any("file" in name or "Storage" in kind for name, kind in arguments):
        raise PlanError(f"The plan's graph calls {target!r}, which may do more than compute a tensor.", REMEDY)
    try:
        check_arguments(found, args, kwargs.items())
    except ValueError as error:
        raise PlanError(
            f"The plan's graph calls {target!r} with other arguments than it has: {error}.", REMEDY
        ) from None


_ATOMS_AS_NUMBERS = ("dtype", "layout", "memory_format")  # as schemas have them
_OPTIONAL, _LIST = re.compile(r"Optional\[(.*)\]"), re.compile(r"List\[(.*)\]")


def check_arguments(schema: Any, args: tuple[Value, ...], kwargs: Iterable[tuple[str, Value]]) -> None:
    """Refuse, with a ``ValueError``, arguments that an operator of this schema does not have.

    >>> from shardwright._torch_compat import schema
    >>> check_arguments(schema("aten.relu.default"), (Ref("x"),), ())
    >>> check_arguments(schema("aten.relu.default"), (Ref("x"),), (("out of nowhere", 1),))
    Traceback (most recent call last):
        ...
    ValueError: it has no argument 'out of nowhere'
    """
    places = [argument for argument in schema.arguments if not argument.kwarg_only]
    if len(args) > len(places):
        raise ValueError(f"it takes {len(places)} arguments by position, not {len(args)}")
    given: dict[str, Value] = {argument.name: value for argument, value in zip(places, args, strict=False)}
    known = {argument.name: argument for argument in schema.arguments}
    for name, value in kwargs:
        if name not in known:
            raise ValueError(f"it has no argument {shown(name)}")
        if name in given:
            raise ValueError(f"its argument {name} is given twice")
        given[name] = value
    for name, argument in known.items():
        if name not in given:
            if not argument.has_default_value() and str(argument.type) != "Device":  # where it runs, nobody writes down
                raise ValueError(f"its argument {name} is missing")
        elif not _fits(str(argument.type), given[name]):
            raise ValueError(f"its argument {name} is {shown(given[name])}, which is no {argument.type}")


def _fits(kind: str, value: Value) -> bool:
    if found := _OPTIONAL.fullmatch(kind):
        return value is None or _fits(found.group(1), value)
    if found := _LIST.fullmatch(kind):
        if isinstance(value, tuple):
            return all(_fits(found.group(1), item) for item in value)
        return found.group(1) in ("int", "float", "bool") and _fits(found.group(1), value)  # one number for all
    return kind in _KINDS and _KINDS[kind](value)


def _number(value: Value) -> bool:
    """A number; a tensor without dims goes wherever a number goes."""
    return isinstance(value, bool | int | float | Ref)


def _whole(value: Value) -> bool:
    return isinstance(value, bool | int | Ref) or (isinstance(value, Atom) and value.kind in _ATOMS_AS_NUMBERS)


_KINDS: dict[str, Callable[[Value], bool]] = {
    "Tensor": lambda value: (
        _number(value) or (isinstance(value, Atom) and value.kind == "complex")
    ),  # or a number for one
    "int": _whole,
    "float": _number,
    "bool": lambda value: isinstance(value, bool | int | Ref),
    "number": lambda value: _number(value) or (isinstance(value, Atom) and value.kind == "complex"),
    "str": lambda value: isinstance(value, str),
    "Device": lambda value: isinstance(value, Atom) and value.kind == "device",
}
