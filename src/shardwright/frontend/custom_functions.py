"""Custom ``autograd.Function``s, kept whole as one operator with their own backward.

``torch.export`` traces through such a function and silently drops its backward, so the graph would train with other
gradients. During a capture every call of one becomes ``shardwright.autograd_function(name, tensors, others)``:
forward applies the function; backward applies it again and asks autograd, which runs the function's own backward. The
name is the class's import path, so a graph that was saved finds it again where its module is imported; a class that
has no such path, or arguments that cannot be written down, are refused. Other operators that stand for several steps of a
model have gradients in the same way (:func:`differentiated_again`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwright._torch_compat import shares_memory, version_of
from shardwright.errors import CaptureError
from shardwright.frontend.containers import known_class
from shardwright.frontend.provenance import asking_line

NAME = "shardwright::autograd_function"
_TENSOR = "<tensor>"
"""Stands in the written arguments where the next tensor goes."""
_returns_tuple: dict[str, bool] = {}


def call_whole(function: type, args: Sequence[Any]) -> Any:
    """``function.apply(*args)`` as one operator."""
    name = f"{function.__module__}:{function.__qualname__}"
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    others = [_TENSOR if isinstance(arg, Tensor) else arg for arg in args]
    try:
        written = json.dumps(others)
        known = _find(name) is function and json.loads(written) == others
    except (TypeError, ValueError, CaptureError):
        known = False
    if not known:
        raise _refused(function, args)
    results = torch.ops.shardwright.autograd_function(name, tensors, written)
    return tuple(results) if _returns_tuple[name] else results[0]


def _refused(function: type, args: Sequence[Any]) -> CaptureError:
    """Which line calls it, what about it cannot be written down, and what to do about that."""
    said = (
        f"At {asking_line()} the model calls the custom autograd.Function {function.__module__}.{function.__qualname__}"
    )
    modules = [type(arg).__name__ for arg in args if isinstance(arg, torch.nn.Module)]
    if modules:  # a reversible block, a checkpoint: its backward asks the modules again
        return CaptureError(
            f"{said} with a module ({modules[0]}) whose parameters get their gradients inside of its backward, where no "
            "plan sees them.",
            "Call the module itself, without the function: plans recompute activations where memory is short (--recompute).",
        )
    return CaptureError(
        f"{said} in a way that cannot be written down, and export would drop its backward.",
        "Define the class at the top of an importable module and pass it tensors and plain numbers only, or wrap it "
        "with torch.library.custom_op and register_autograd.",
    )


def _find(name: str) -> Any:
    found = known_class(name)
    if not issubclass(found, torch.autograd.Function):
        raise CaptureError(f"{name!r} is no autograd.Function.", "Capture the model again.")
    return found


def _merged(tensors: Sequence[Tensor], others: str) -> list[Any]:
    """The arguments of the function: each tensor in its place among the written ones."""
    following = iter(tensors)
    return [next(following) if isinstance(other, str) and other == _TENSOR else other for other in json.loads(others)]


def _apply(name: str, tensors: Sequence[Tensor], others: str) -> list[Tensor]:
    versions = [version_of(tensor) for tensor in tensors]
    with _where(tensors):
        results = _original_apply(_find(name))(*_merged(tensors, others))
    if versions != [version_of(tensor) for tensor in tensors]:
        raise CaptureError(
            f"The custom autograd.Function {name} changes its arguments in place.", "Let it return a new tensor."
        )
    _returns_tuple[name] = isinstance(results, tuple)
    # An operator may not return its own input, which identity-like functions do.
    return [r.clone() if any(shares_memory(r, t) for t in tensors) else r for r in _as_tuple(results)]


def _where(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Where a function's tensors have no values, neither have those that it makes itself: PyTorch does not mix the two,
    though it takes a single number from the CPU on any other device."""
    return torch.device("meta") if any(tensor.is_meta for tensor in tensors) else nullcontext()


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


_APPLY = torch.autograd.Function.__dict__["apply"]


def _original_apply(function: type) -> Callable[..., Any]:
    """The class's ``apply`` whether or not a capture has replaced it for now."""
    return _APPLY.__get__(None, function)


@torch.library.custom_op(NAME, mutates_args=())
def _operator(function: str, tensors: Sequence[Tensor], others: str) -> list[Tensor]:
    with torch.no_grad():
        return _apply(function, tensors, others)


@_operator.register_fake
def _(function: str, tensors: Sequence[Tensor], others: str) -> list[Tensor]:
    with torch.no_grad():
        return _apply(function, tensors, others)


def differentiated_again(operator: Any, again: Callable[..., Sequence[Tensor]]) -> None:
    """Give an operator of ``(text, tensors, *texts)`` the gradients that its tensors have where ``again`` performs it."""

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.text, tensors, *ctx.others = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        tensors = [tensor.detach() for tensor in ctx.saved_tensors]
        wanted = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        with torch.enable_grad():
            results = again(ctx.text, tensors, *ctx.others)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
        found: Iterable[Tensor | None] = [None] * len(wanted)
        if pairs:
            found = torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        by_tensor = {id(tensor): grad for tensor, grad in zip(wanted, found, strict=True)}
        return None, [by_tensor.get(id(tensor)) for tensor in tensors], *[None for _ in ctx.others]

    operator.register_autograd(backward, setup_context=remember)


def _again(function: str, tensors: Sequence[Tensor], others: str) -> tuple[Any, ...]:
    with _where(tensors):
        return _as_tuple(_original_apply(_find(function))(*_merged(tensors, others)))


differentiated_again(_operator, _again)
