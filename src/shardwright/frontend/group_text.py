"""The text of a group of operators around unknown extents, read with suspicion.

A group (:mod:`shardwright.frontend.unknown_extents`) is one operator whose first argument says, as JSON, what it performs.
Graphs come from files, so that text may say anything: operators are handed out with their arguments, to be looked at as
those of the graph itself are, and functions on plain numbers are these and no others (others of Python's ``operator`` call
or fetch whatever they are asked for).
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from shardwright._torch_compat import operator as operator_named
from shardwright.errors import CaptureError, GraphError, ShardwrightError
from shardwright.graph import Atom, Ref, Value
from shardwright.graph.core import DTYPE_BYTES
from shardwright.graph.serial import ATOMS
from shardwright.records import shown

_HOMES = {"operator": operator, "math": math, "torch": torch}
_NAMES = {
    "operator": "abs add and_ eq floordiv ge getitem gt index inv invert le lshift lt mod mul ne neg not_ or_ pos pow "
    "rshift sub truediv truth xor",
    "math": "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs floor fmod "
    "isfinite isinf isnan log log10 log1p log2 pow radians remainder sin sinh sqrt tan tanh trunc",
    "torch": "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum",
}
FUNCTIONS = {home: frozenset(names.split()) for home, names in _NAMES.items()}
"""Functions on numbers read from data, by the modules that have them."""
MOST_BITS = 64
"""By how much a whole number may be shifted, or raised, at once."""


def calls_inside(body: str, tensors: int) -> list[tuple[str, tuple[Value, ...], dict[str, Value]]]:
    """The operators that a group performs on so many tensors, with their arguments as those of a graph; arithmetic on plain
    numbers is looked at and left out.

    Raises
    ------
    GraphError
        Where this is not what a capture writes: the text may come from a file.
    """
    try:
        document = json.loads(body)
        known = {f"input {number}" for number in range(tensors)}
        found = []
        for name, target, args, kwargs, grad in document["nodes"]:
            given = tuple(_value(value, known) for value in args)
            named = {key: _value(value, known) for key, value in kwargs.items()}
            if not isinstance(name, str) or not isinstance(grad, bool):
                raise ValueError(f"an operator is named {shown(name)}")
            known.add(f"value {name}")
            if ":" in target:
                function_named(target)
            else:
                found.append((target, given, named))
        for name, dtype, shape in document["results"]:
            if f"value {name}" not in known or dtype not in DTYPE_BYTES or not all(type(n) is int for n in shape):
                raise ValueError(f"{shown(name)} is no result")
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ShardwrightError) as error:
        why = error.message if isinstance(error, ShardwrightError) else str(error)
        raise GraphError(
            f"A group of operators around unknown extents is damaged: {shown(why)}.", "Capture the model again."
        ) from None


def _value(value: Any, known: set[str]) -> Value:
    """A written argument as a graph has it; ``known`` are the tensors and values that there are before it."""
    if isinstance(value, list):
        return tuple(_value(item, known) for item in value)
    if not isinstance(value, dict):
        return value  # what JSON holds beside lists and objects
    ((kind, inner),) = value.items()
    if kind in ("ref", "input"):
        name = f"value {inner}" if kind == "ref" else f"input {inner if type(inner) is int else None}"
        if name not in known:
            raise ValueError(f"{shown(inner)} is not there yet")
        return Ref(name)
    if kind == "float":
        return float(inner)
    if kind == "device":
        return Atom("device", "cpu")
    if kind != "torch":
        raise ValueError(f"{shown(kind)} is no kind of argument")
    return Atom(next((known_kind for known_kind, names in ATOMS.items() if inner in names), "nothing"), inner)


def function_named(target: str) -> Any:
    """An operator, or ``module:function`` on plain numbers."""
    module, colon, name = target.partition(":")
    if not colon:
        return operator_named(target)
    if name not in FUNCTIONS.get(module, ()):
        raise CaptureError(f"{target!r} is no arithmetic on numbers.", "Capture the model again.")
    found = getattr(_HOMES[module], name)
    return _bounded(found) if target in ("operator:pow", "operator:lshift") else found


def _bounded(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A power or a shift that does not fill the memory with one number."""

    def checked(one: Any, other: Any) -> Any:
        if isinstance(one, int) and isinstance(other, int) and other > MOST_BITS:
            raise CaptureError(f"A number is raised or shifted by {other}.", "Capture the model again.")
        return function(one, other)

    return checked
