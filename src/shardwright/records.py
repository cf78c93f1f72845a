"""JSON values into dataclasses, strictly: every key, every type, every length is looked at before anything is built.

The types are those the dataclasses declare already, so that a new field needs no code here: ``str``, ``int``, ``float``
(finite, whole numbers welcome), ``bool``, ``X | None``, ``tuple[X, ...]``, ``tuple[X, Y]``, ``frozenset[X]``,
``dict[str, X]``, other dataclasses and ``Any``. What does not fit is one sentence that names the place
(``prediction.step_seconds``) and quotes what stands there.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, Union, cast

from shardwright.errors import ShardwrightError

Record = TypeVar("Record")
Reader = Callable[[Any, str], Any]


class Mismatch(Exception):  # noqa: N818 - what does not fit; callers turn it into their own error
    """Where a value does not fit, and why, as a clause."""


def read_record(
    kind: type[Record], value: Any, *, where: str, error: type[ShardwrightError], remedy: str = "Write it again."
) -> Record:
    """``value`` (from JSON) as an instance of the dataclass ``kind``; else an ``error`` that begins with ``where``.

    >>> from shardwright.errors import PlanError
    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: float
    ...     name: str = ""
    >>> read_record(Point, {"x": 1}, where="the file is damaged", error=PlanError)
    Point(x=1.0, name='')
    >>> read_record(Point, {"x": "1"}, where="the file is damaged", error=PlanError)
    Traceback (most recent call last):
        ...
    shardwright.errors.PlanError: the file is damaged: x is '1', not a number. Write it again.
    """
    try:
        return cast(Record, reader(cast(Any, kind))(value, ""))
    except Mismatch as found:
        raise error(f"{where}: {found}.", remedy) from None


def shown(value: Any) -> str:
    """A value as an error quotes it: short however large it is."""
    return reprlib.repr(value)


def _fail(place: str, value: Any, wanted: str) -> typing.NoReturn:
    raise Mismatch(f"{place or 'it'} is {shown(value)}, not {wanted}")


@cache
def reader(kind: Any) -> Reader:
    """The function that checks and converts a value of a declared type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value, place: value
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin in (Union, types.UnionType):
        return _optional(arguments)
    if origin in (tuple, frozenset):
        return _sequence(origin, arguments)
    if origin in (dict, Mapping):
        return _mapping(arguments[1])
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    raise TypeError(f"{kind} cannot be read from JSON")


def _text(value: Any, place: str) -> str:
    return value if isinstance(value, str) else _fail(place, value, "a text")


def _whole(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        _fail(place, value, "a whole number")
    return value


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _fail(place, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        _fail(place, value, "a number")
    return number if math.isfinite(number) else _fail(place, value, "a finite number")


def _truth(value: Any, place: str) -> bool:
    return value if isinstance(value, bool) else _fail(place, value, "true or false")


def _nothing(value: Any, place: str) -> None:
    return None if value is None else _fail(place, value, "null")


_PLAIN: dict[Any, Reader] = {str: _text, int: _whole, float: _number, bool: _truth, type(None): _nothing}


def _optional(arguments: tuple[Any, ...]) -> Reader:
    readers = [reader(argument) for argument in arguments if argument is not type(None)]
    nullable = len(readers) < len(arguments)

    def read(value: Any, place: str) -> Any:
        if value is None and nullable:
            return None
        for one in readers[:-1]:
            try:
                return one(value, place)
            except Mismatch:
                continue
        return readers[-1](value, place)

    return read


def _sequence(origin: Any, arguments: tuple[Any, ...]) -> Reader:
    if origin is frozenset or arguments[-1] is ...:
        item = reader(arguments[0])

        def read(value: Any, place: str) -> Any:
            if not isinstance(value, (list, tuple)):
                _fail(place, value, "a list")
            return origin(item(entry, f"{place}[{number}]") for number, entry in enumerate(value))

        return read
    items = [reader(argument) for argument in arguments]

    def read_fixed(value: Any, place: str) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(items):
            _fail(place, value, f"a list of {len(items)}")
        return tuple(one(entry, f"{place}[{n}]") for n, (one, entry) in enumerate(zip(items, value, strict=True)))

    return read_fixed


def _mapping(argument: Any) -> Reader:
    item = reader(argument)

    def read(value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            _fail(place, value, "an object")
        return {key: item(entry, _inside(place, key)) for key, entry in value.items()}

    return read


def _dataclass(kind: Any) -> Reader:
    others = getattr(kind, "others_allowed", False)  # formats of other people may hold more than we read
    hints = typing.get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    readers = {field.name: reader(hints[field.name]) for field in fields}
    required = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]

    def read(value: Any, place: str) -> Any:
        if not isinstance(value, Mapping):
            _fail(place, value, "an object")
        if not others and (unknown := [key for key in value if key not in readers]):
            raise Mismatch(f"{_inside(place, unknown[0])} is not known to this version")
        if missing := [key for key in required if key not in value]:
            raise Mismatch(f"{_inside(place, missing[0])} is missing")
        known = {key: entry for key, entry in value.items() if key in readers}
        return kind(**{key: readers[key](entry, _inside(place, key)) for key, entry in known.items()})

    return read


def _inside(place: str, key: str) -> str:
    key = key if len(key) <= 60 else key[:57] + "..."
    return f"{place}.{key}" if place else key
