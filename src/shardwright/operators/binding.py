"""From an operator's arguments to its loop nest: arguments by name, tensors as symbols, mistakes with their line."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import DescriptionError
from shardwright.graph import Op, Ref, Tensor, Value
from shardwright.operators.language import Nest, TensorArgument, nest


@dataclass(frozen=True)
class Bound:
    """An operator's arguments by the names of its schema, defaults filled in; tensors are still references."""

    names: tuple[str, ...]
    values: dict[str, Value]


def bind(op: Op) -> Bound:
    """Arguments by name.

    >>> bind(Op("l", "aten.linear.default", (Ref("x"), Ref("w")), (), ("y",))).values["bias"] is None
    True
    """
    from shardwright._torch_compat import schema

    arguments = schema(op.target).arguments
    values: dict[str, Value] = {}
    given = dict(op.kwargs)
    for position, argument in enumerate(arguments):
        if position < len(op.args):
            values[argument.name] = op.args[position]
        elif argument.name in given:
            values[argument.name] = given[argument.name]
        else:
            default = argument.default_value if argument.has_default_value() else None
            values[argument.name] = tuple(default) if isinstance(default, list) else default
    return Bound(tuple(argument.name for argument in arguments), values)


def symbolic(op: Op, tensors: dict[str, Tensor]) -> tuple[Bound, dict[str, Any], tuple[TensorArgument, ...]]:
    """The bound arguments with tensors as symbols, and those symbols in the order of ``Op.inputs``."""
    bound = bind(op)
    symbols: list[TensorArgument] = []

    def convert(value: Value, name: str) -> Any:
        if isinstance(value, Ref):
            t = tensors[value.name]
            symbols.append(TensorArgument(len(symbols), name, t.shape, t.dtype, t.grad))
            return symbols[-1]
        if isinstance(value, tuple):
            return tuple(convert(v, f"{name}{i}") for i, v in enumerate(value))
        return value

    # Op.inputs lists positional arguments first, then keywords in the order given.
    positional = list(bound.names[: len(op.args)])
    order = positional + [k for k, _ in op.kwargs if k not in positional]
    converted = {name: convert(bound.values[name], name) for name in order if name in bound.values}
    full = {name: converted.get(name, bound.values[name]) for name in bound.names}
    return bound, full, tuple(symbols)


def run(
    function: Callable[..., Any], arguments: dict[str, Any], shapes: Sequence[tuple[int, ...] | None]
) -> Nest | None:
    """Build the loop nest; every mistake becomes a :class:`DescriptionError` naming the line of the description."""

    def build() -> Nest | None:
        lambdas = lambdas_of(function, arguments, shapes)
        return None if lambdas is None else nest(lambdas, shapes)

    return guarded(function, build)


def lambdas_of(
    function: Callable[..., Any], arguments: dict[str, Any], shapes: Sequence[tuple[int, ...] | None] | None
) -> Any:
    """What a description returns for these arguments: one lambda per output, or ``None``."""
    return function(*_positional(function, arguments), **_keywords(function, arguments, shapes))


def guarded(function: Callable[..., Any], body: Callable[[], Any]) -> Any:
    """Run ``body``; a mistake in the description is reported with its line."""
    try:
        return body()
    except DescriptionError as error:
        raise DescriptionError(f"{_line(function, sys.exc_info()[2])}: {error.message}", error.remedy) from None
    except NameError as error:
        raise DescriptionError(
            f"{_line(function, sys.exc_info()[2])}: {error}.", "Every index must be bound by a lambda around it."
        ) from None
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise DescriptionError(
            f"{_line(function, sys.exc_info()[2])}: {error}", "Descriptions index tensors and combine the elements."
        ) from error


def _positional(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
    wanted = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return list(arguments.values())[: len(wanted)]


def _keywords(
    function: Callable[..., Any], arguments: dict[str, Any], shapes: Sequence[tuple[int, ...] | None] | None
) -> dict[str, Any]:
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {name: shapes and tuple(shapes) if name == "out" else arguments.get(name) for name in names}


def _line(function: Callable[..., Any], trace: Any) -> str:
    """``file:line`` inside the description where it went wrong."""
    code = function.__code__
    lines = [frame for frame in traceback.extract_tb(trace) if frame.filename == code.co_filename]
    number = lines[-1].lineno if lines else code.co_firstlineno
    return f"{code.co_filename}:{number} ({function.__name__})"
