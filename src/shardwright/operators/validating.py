"""A description is tried when it is registered, before any graph exists.

Tensors stand there without shapes: their rank is what the first indexing says, and later ones must agree. Sizes are
made up. A description that asks for a shape cannot be tried this way and is left for its first use, unless its author
gave example shapes. Unbound indices, products of indices, wrong ranks and names that do not exist are found here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shardwright.errors import DescriptionError
from shardwright.operators.binding import guarded, lambdas_of
from shardwright.operators.language import Access, TensorArgument, nest

SIZE = 4
STARS = (2, 3, 1, 0, 4)
"""How many dims ``*i`` may stand for in a trial; one of them must fit."""


class _NeedsShape(Exception):  # noqa: N818 - not an error: the trial ends here
    pass


class _Unshaped(TensorArgument):
    """A tensor whose rank is learnt from the way it is indexed."""

    def __init__(self, position: int, name: str) -> None:
        object.__setattr__(self, "position", position)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "dtype", "float32")
        object.__setattr__(self, "grad", True)
        object.__setattr__(self, "learnt", [])

    def __getattribute__(self, attribute: str) -> Any:
        if attribute in ("shape", "rank"):
            raise _NeedsShape
        return super().__getattribute__(attribute)

    def __getitem__(self, index: Any) -> Access:
        count = len(index) if isinstance(index, tuple) else 1
        learnt: list[int] = object.__getattribute__(self, "learnt")
        if learnt and learnt[0] != count:
            raise DescriptionError(
                f"{self.name} is indexed with {learnt[0]} indices in one place and with {count} in another.",
                "Use one index per dim; write ':' for a dim that is needed whole.",
            )
        learnt[:] = [count]
        return TensorArgument(self.position, self.name, (SIZE,) * count)[index]

    def at(self, index: Sequence[Any]) -> Access:
        raise _NeedsShape

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return self is other


def validate(target: str, function: Callable[..., Any], shapes: Sequence[Sequence[int]] = ()) -> None:
    """Try a description; raises :class:`DescriptionError` naming the line where it is malformed.

    ``shapes`` are example shapes of its tensor arguments, in order.
    """
    first: DescriptionError | None = None
    size = min((extent for shape in shapes for extent in shape), default=SIZE)
    for stars in STARS:
        arguments = _arguments(target, shapes)
        if arguments is None:
            return
        try:
            guarded(function, partial(_try, function, arguments, stars, size))
            return
        except _NeedsShape:
            return
        except DescriptionError as error:
            if error.__cause__ is not None:
                return  # made-up arguments may upset honest code
            first = first or error
    assert first is not None
    raise first from None


def _try(function: Callable[..., Any], arguments: dict[str, Any], stars: int, size: int) -> None:
    if "out" in inspect.signature(function).parameters:
        raise _NeedsShape
    made = lambdas_of(function, arguments, None)
    for one in made if isinstance(made, (tuple, list)) else (made,):
        if one is not None:
            kinds = [p.kind for p in inspect.signature(one).parameters.values() if p.default is p.empty]
            starred = inspect.Parameter.VAR_POSITIONAL in kinds
            nest(one, [(size,) * (len(kinds) - 1 + stars if starred else len(kinds))])


def _arguments(target: str, shapes: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """Made-up arguments by the operator's schema; ``None`` where the operator does not exist (yet)."""
    from shardwright._torch_compat import schema

    try:
        found = schema(target).arguments
    except (AttributeError, RuntimeError, ValueError):
        return None
    given = iter(shapes)
    arguments: dict[str, Any] = {}
    position = 0
    for argument in found:
        kind = str(argument.type)
        if kind == "Tensor":
            shape = next(given, None)
            name = argument.name
            arguments[name] = (
                _Unshaped(position, name) if shape is None else TensorArgument(position, name, tuple(shape), grad=True)
            )
            position += 1
        elif argument.has_default_value():
            default = argument.default_value
            arguments[argument.name] = tuple(default) if isinstance(default, list) else default
        else:
            samples = {"int": 1, "float": 1.0, "number": 1.0, "bool": False, "str": ""}
            if kind not in samples:
                return None
            arguments[argument.name] = samples[kind]
    return arguments
