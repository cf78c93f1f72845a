"""``int(x)`` of a tensor, read like ``x.item()``: a number that every step takes from its own data.

Python lets ``int`` give nothing but an ``int``, and so a trace that has no values stops there. While this lasts, the modules
of the model see another ``int`` that gives what ``item()`` gives, which may go into a roll, a shift or a slice.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright._torch_compat import has_data
from shardwright.process_wide import in_turn


class _Kind(type):
    """Passes for ``int`` where types are asked for."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.Tensor) and not has_data(args[0]):
            return args[0].item()
        return builtins.int(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.int)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.int)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is builtins.int

    def __hash__(cls) -> builtins.int:
        return hash(builtins.int)


class _Int(builtins.int, metaclass=_Kind):
    pass


@contextmanager
def numbers_of_data(model: torch.nn.Module) -> Iterator[None]:
    """While this lasts, ``int`` means this in every Python module that defines a part of ``model``."""
    names = {type(part).__module__ for part in model.modules()}
    homes = [vars(sys.modules[name]) for name in names if name in sys.modules and name.split(".")[0] != "torch"]
    homes = [home for home in homes if "int" not in home]
    with in_turn():
        for home in homes:
            home["int"] = _Int
        try:
            yield
        finally:
            for home in homes:
                del home["int"]
