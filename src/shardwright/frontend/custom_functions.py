"""Custom ``autograd.Function``s, kept whole as one operator with their own backward.

``torch.export`` traces through such a function and silently drops its backward, so the graph would train with other
gradients. During a capture every call of one becomes ``shardwright.autograd_function(name, tensors, others)``:
forward applies the function; backward applies it again and asks autograd, which runs the function's own backward. The
name is the class's import path, so a graph that was saved finds it again; a class that cannot be imported, or
arguments that cannot be written down, are refused.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CaptureError

NAME = "shardwright::autograd_function"
_returns_tuple: dict[str, bool] = {}


def call_whole(function: type, args: Sequence[Any]) -> Any:
    """``function.apply(*args)`` as one operator."""
    name = f"{function.__module__}:{function.__qualname__}"
    tensors = [arg if isinstance(arg, Tensor) else None for arg in args]
    others = [None if isinstance(arg, Tensor) else arg for arg in args]
    try:
        written = json.dumps(others)
        known = _find(name) is function and json.loads(written) == others
    except (TypeError, ValueError, ImportError, AttributeError):
        known = False
    if not known:
        raise CaptureError(
            f"The model calls the custom autograd.Function {function.__module__}.{function.__qualname__} in a way that "
            "cannot be written down, and export would drop its backward.",
            "Define the class at the top of an importable module and pass it tensors and plain numbers only, or wrap it "
            "with torch.library.custom_op and register_autograd.",
        )
    results = torch.ops.shardwright.autograd_function(name, tensors, written)
    return tuple(results) if _returns_tuple[name] else results[0]


def _find(name: str) -> Any:
    module, _, qualified = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def _apply(name: str, tensors: Sequence[Tensor | None], others: str) -> list[Tensor]:
    function = _find(name)
    args = [other if tensor is None else tensor for tensor, other in zip(tensors, json.loads(others), strict=True)]
    versions = [tensor._version for tensor in tensors if tensor is not None]
    results = _original_apply(function)(*args)
    if versions != [tensor._version for tensor in tensors if tensor is not None]:
        raise CaptureError(
            f"The custom autograd.Function {name} changes its arguments in place.", "Let it return a new tensor."
        )
    _returns_tuple[name] = isinstance(results, tuple)
    given = [tensor for tensor in tensors if tensor is not None]
    # An operator may not return its own input, which identity-like functions do.
    return [r.clone() if any(r is g for g in given) or r._is_view() else r for r in _as_tuple(results)]


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


_APPLY = torch.autograd.Function.__dict__["apply"]


def _original_apply(function: type) -> Callable[..., Any]:
    """The class's ``apply`` whether or not a capture has replaced it for now."""
    return _APPLY.__get__(None, function)


@torch.library.custom_op(NAME, mutates_args=())
def _operator(function: str, tensors: Sequence[Tensor | None], others: str) -> list[Tensor]:
    with torch.no_grad():
        return _apply(function, tensors, others)


@_operator.register_fake
def _(function: str, tensors: Sequence[Tensor | None], others: str) -> list[Tensor]:
    with torch.no_grad():
        return _apply(function, tensors, others)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.function, tensors, ctx.others = inputs
    ctx.present = [tensor is not None for tensor in tensors]
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None))


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[None, list[Tensor | None], None]:
    saved = iter(ctx.saved_tensors)
    tensors = [next(saved).detach() if present else None for present in ctx.present]
    wanted = [t.requires_grad_() for t in tensors if t is not None and t.is_floating_point()]
    with torch.enable_grad():
        function = _find(ctx.function)
        args = [other if t is None else t for t, other in zip(tensors, json.loads(ctx.others), strict=True)]
        results = _as_tuple(_original_apply(function)(*args))
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
    found = torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    by_tensor = {id(tensor): grad for tensor, grad in zip(wanted, found, strict=True)}
    return None, [None if t is None else by_tensor.get(id(t)) for t in tensors], None


_operator.register_autograd(_backward, setup_context=_remember)
