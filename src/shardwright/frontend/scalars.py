"""Tensors without dims that models use as Python numbers: made into tensors of them, given as sizes, or read by ``int(x)``.

``torch.tensor([x.max(), y.max()])`` copies values, which a trace has none of; it is captured as the stack it means.
``F.pad(x, (left, right))`` takes tensors for sizes without asking them (``int(left)``) where anybody hears it: here they are
asked.

Python lets ``int`` give nothing but an ``int``, and so a trace that has no values stops there. Where a capture asks for it,
the modules of the model see another ``int`` that gives what ``item()`` gives: a number that every step takes from its own
data, which may go into a roll, a shift or a slice.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright._torch_compat import has_data
from shardwright.process_wide import in_turn

TAKE_SIZES = {
    functional.pad,
    functional.interpolate,
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.Tensor.expand,
    torch.Tensor.repeat,
    torch.reshape,
    torch.zeros,
    torch.ones,
    torch.empty,
    torch.full,
    torch.arange,
    torch.multinomial,
}
"""Functions whose arguments beyond the first tensor, also in tuples, are whole numbers."""
_MAKING = {torch.zeros, torch.ones, torch.empty, torch.full, torch.arange}
"""Those of them that take no tensor first."""


def numbers_for(function: Any, args: Any, kwargs: Any, ask: Callable[[Tensor], int]) -> tuple[Any, Any]:
    """``args`` and ``kwargs`` of a function, with what ``ask`` says in place of each tensor that stands for a size."""
    if function is torch.Tensor.__getitem__:
        return (args[0], _bounded(args[1], ask)), kwargs
    if function not in TAKE_SIZES:
        return args, kwargs

    def asked(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(asked, value)) if not hasattr(value, "_fields") else value
        is_size = isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point()
        return ask(value) if is_size else value

    first = 1 if args and isinstance(args[0], Tensor) and function not in _MAKING else 0
    return (*args[:first], *map(asked, args[first:])), {name: asked(value) for name, value in kwargs.items()}


def _bounded(index: Any, ask: Callable[[Tensor], int]) -> Any:
    """An index whose slices begin and end at plain numbers; a tensor that is an index itself stays one."""
    if isinstance(index, tuple):
        return tuple(_bounded(part, ask) for part in index)
    if not isinstance(index, slice):
        return index
    ends = (index.start, index.stop, index.step)
    return slice(*(ask(end) if isinstance(end, Tensor) else end for end in ends))


def tensor_of(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **others: Any) -> Tensor:
    """``torch.tensor``, also of tensors whose values are not known while a model is traced."""
    if isinstance(data, Tensor) or all(has_data(leaf) for leaf in _tensors(data)):
        return torch.tensor(data, dtype=dtype, device=device, **others)
    made = _stacked(data)
    return made.detach().to(dtype=dtype or made.dtype, device=device or made.device)


def _tensors(data: Any) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _tensors(item)


def _stacked(data: Any) -> Tensor:
    if isinstance(data, Tensor):
        return data
    if not isinstance(data, list | tuple):
        return torch.tensor(data)
    parts = [_stacked(item) for item in data]
    common = parts[0].dtype
    for part in parts[1:]:
        common = torch.promote_types(common, part.dtype)
    return torch.stack([part.to(common) for part in parts])


def detached(tensor: Tensor) -> Tensor:
    """``tensor.data``: a trace knows nothing of a tensor that was taken out of it, and does of one that is detached."""
    return tensor.data if has_data(tensor) else tensor.detach()


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
