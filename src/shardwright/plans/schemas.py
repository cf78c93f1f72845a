"""Arguments of an operator in a graph that a file brought along, held against the operator's schema.

What is called with them are operators of PyTorch, which check their arguments themselves; but a name that is no argument, a
text where a number belongs or an argument given twice is a damaged or crafted file, and is said so before anything is built
of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from shardwright.graph import Atom, Ref, Value
from shardwright.records import shown

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
