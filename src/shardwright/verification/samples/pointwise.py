"""Samples of every element-wise operator, made from its schema: tensors of three broadcast shapes, small numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwright._torch_compat import operator, schema
from shardwright.operators.elementwise import RANDOM, base_name, is_elementwise
from shardwright.operators.record import record
from shardwright.verification.samples.core import SAMPLES, Pick, Spec, bools, make, sample, t

UNDEFINED = frozenset({"empty_like"})
"""Operators whose content nobody can compare."""
CONTENTS = ("positive", "ints", "bools", "complex")
"""Tried in this order until the operator accepts one."""


def elementwise_targets() -> list[str]:
    """Every functional ATen operator that the element-wise rule serves."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            target = f"aten.{name}.{overload}"
            if (
                name.endswith("_backward")
                or record(target).function is not None
                or base_name(target) in RANDOM | UNDEFINED
            ):
                continue
            if is_elementwise(target) and _functional(target):
                found.append(target)
    return sorted(found)


def _functional(target: str) -> bool:
    arguments, returns = schema(target).arguments, schema(target).returns
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    tensors = sum(str(a.type) == "Tensor" for a in arguments)
    return not writes and tensors > 0 and bool(returns) and all(str(r.type) == "Tensor" for r in returns)


def arguments_for(target: str, content: str, grad: bool, sizes: tuple[int, int]) -> tuple[Any, ...] | None:
    """Arguments by the schema's types; ``None`` where a required one is of a kind nobody can guess."""
    a, b = sizes
    shapes = iter([(a, b), (b,), (a, 1), (a, b), (a, b)])
    values: list[Any] = []
    for argument in schema(target).arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            values.append(Spec(next(shapes), content, 0, 4, grad=grad))
        elif argument.has_default_value():
            break
        elif kind in ("number", "float"):
            values.append(0.5 if content == "positive" else 2)
        elif kind == "int":
            values.append(1)
        elif kind == "bool":
            values.append(False)
        else:
            return None
    if any(a.kwarg_only and not a.has_default_value() for a in schema(target).arguments[len(values) :]):
        return None
    return (*values, {})


def accepted(target: str) -> tuple[str, bool] | None:
    """The first content the operator takes, and whether it can be differentiated there."""
    for content in CONTENTS:
        arguments = arguments_for(target, content, False, (2, 3))
        if arguments is None:
            return None
        tensors = [make(v, torch.Generator().manual_seed(0)) if isinstance(v, Spec) else v for v in arguments[:-1]]
        try:
            result = operator(target)(*tensors)
        except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
            continue
        first = result[0] if isinstance(result, (tuple, list)) else result
        if isinstance(first, torch.Tensor) and first.shape == (2, 3):
            return content, content == "positive" and _differentiable(target, tensors)
    return None


def _differentiable(target: str, values: list[Any]) -> bool:
    tensors = [v.requires_grad_() if isinstance(v, torch.Tensor) else v for v in values]
    try:
        result = operator(target)(*tensors)
        for r in result if isinstance(result, (tuple, list)) else (result,):
            if r.requires_grad:
                r.sum().backward(retain_graph=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def register() -> None:
    """Add a sample for every element-wise operator; done once, when somebody asks for all of them."""
    for target in elementwise_targets():
        if target in SAMPLES:
            continue
        found = accepted(target)
        if found is not None:
            SAMPLES[target] = _sample(target, *found)


def _sample(target: str, content: str, grad: bool) -> Any:
    def calls(pick: Pick) -> Iterator[Any]:
        arguments = arguments_for(target, content, grad, tuple(pick(2)))
        if arguments is not None:
            yield arguments

    return calls


@sample("aten.clamp.default", "aten.clip.default")
def clamp(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), -0.5, 0.5


@sample("aten.clamp.Tensor", "aten.clip.Tensor")
def clamp_tensor(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), t(b), t(a, 1)


@sample("aten.div.Tensor_mode", "aten.divide.Tensor_mode")
def div_mode(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), t(b), {"rounding_mode": "floor"}
    yield t(a, b), t(b), {"rounding_mode": None}


@sample("aten.div.Scalar_mode", "aten.divide.Scalar_mode")
def div_scalar_mode(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), 0.3, {"rounding_mode": "trunc"}


@sample("aten.masked_fill.Tensor")
def masked_fill(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), bools(b), t()


@sample("aten.masked_fill.Scalar")
def masked_fill_scalar(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), bools(b), 0.0
    yield t(a, b), bools(a, 1), float("-inf")


@sample("aten.where.self")
def where(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield bools(a, b), t(a, b), t(b)
