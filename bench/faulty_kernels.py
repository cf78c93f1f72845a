"""Faults in how one rank computes its piece of an operator: a border, a count, a statistic (see :mod:`mutations`)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from planting import around, in_kernel, mutation, pictures, words
from shardwright.operators.families import convolutions, losses, normalisations
from shardwright.operators.pieces import Call, Piece


@mutation("embedding boundary off by one", words)
def _(stack: ExitStack) -> None:
    def shifted(original: Any, call: Call) -> Any:
        made = original(call)
        span = call.input_spans(0).get(0)
        if made is None or span is None:
            return made

        def kernel(weight: Tensor, indices: Tensor, exchange: Any = None) -> Tensor:
            found = made.kernel(weight, indices, exchange=exchange)
            return found * (indices != span.stop - 1).unsqueeze(-1)

        return Piece(kernel=kernel)

    in_kernel(stack, "aten.embedding.default", shifted)


@mutation("padding of ones", pictures)
def _(stack: ExitStack) -> None:
    around(stack, convolutions, "padded", lambda original, x, missing, fill: original(x, missing, 1.0))


@mutation("batch-norm momentum", pictures)
def _(stack: ExitStack) -> None:
    def other(original: Any, call: Call) -> Any:
        values = call.op.args
        momentum = call.argument("momentum")
        args = tuple(1 - momentum if value == momentum else value for value in values)
        return original(replace(call, op=replace(call.op, args=args)))

    in_kernel(stack, "aten._native_batch_norm_legit_functional.default", other)


@mutation("biased variance", pictures)
def _(stack: ExitStack) -> None:
    def biased(original: Any, call: Call) -> Any:
        made = original(call)
        x = call.tensors[call.op.inputs[0]].shape
        count = x[0] * x[2] * x[3]
        if made is None or made.kernel is None:
            return made

        def kernel(*tensors: Tensor, exchange: Any = None) -> Any:
            *results, variance = made.kernel(*tensors, exchange=exchange)
            momentum = call.argument("momentum")
            old = tensors[-1]
            return (*results, old * (1 - momentum) + (variance - old * (1 - momentum)) * (count - 1) / count)

        return Piece(kernel=kernel)

    in_kernel(stack, "aten._native_batch_norm_legit_functional.default", biased)


@mutation("local label count", words)
def _(stack: ExitStack) -> None:
    around(stack, losses, "everywhere", lambda original, exchange, x, reduce, loops: x)


@mutation("doubled loss divisor", words)
def _(stack: ExitStack) -> None:
    around(stack, losses, "everywhere", lambda original, *arguments: original(*arguments) * 2)


@mutation("layer-norm count", words)
def _(stack: ExitStack) -> None:
    def local(original: Any, x: Tensor, dims: Any, count: int, loops: Any, exchange: Any) -> Any:
        return original(x, dims, count // 2, loops, exchange)

    around(stack, normalisations, "moments", local)


@mutation("causal offset", words)
def _(stack: ExitStack) -> None:
    def from_zero(original: Any, call: Call) -> Any:
        rank = len(call.output.shape)
        span = call.output_spans().get(rank - 2)
        if span is None:
            return original(call)
        return call.kernel(
            lambda exchange, **a: F.scaled_dot_product_attention(
                a["query"],
                a["key"],
                a["value"],
                torch.arange(span.size, device=a["key"].device).unsqueeze(1)
                >= torch.arange(a["key"].shape[-2], device=a["key"].device),
                scale=a["scale"],
            )
        )

    in_kernel(stack, "aten.scaled_dot_product_attention.default", from_zero)


@mutation("softmax exchange", words)
def _(stack: ExitStack) -> None:
    def alone(original: Any, call: Call) -> Any:
        made = original(call)
        if made is None or made.kernel is None:
            return made
        return Piece(kernel=lambda *tensors, exchange=None: made.kernel(*tensors, exchange=lambda x, *_: x))

    in_kernel(stack, "aten.softmax.int", alone)
