"""Custom operators for the tests, made from differentiable formulas."""

from __future__ import annotations

import torch
from torch import Tensor


def _backward(function):
    """Autograd of a custom operator by differentiating its own formula."""

    def backward(ctx, gradient):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved]
            result = function(*inputs)
        return torch.autograd.grad(result, inputs, gradient)

    def setup(ctx, inputs, output):
        ctx.saved = inputs

    return backward, setup


def define(name, formula, arguments):
    """``torch.library.custom_op`` of a formula in differentiable operations."""
    annotations = dict.fromkeys(arguments, Tensor) | {"return": Tensor}

    def call(*inputs):
        return formula(*inputs).clone()

    namespace: dict = {"call": call}
    exec(f"def operator({', '.join(arguments)}):\n    return call({', '.join(arguments)})", namespace)
    operator = namespace["operator"]
    operator.__annotations__ = annotations
    made = torch.library.custom_op(f"shardwright_tests::{name}", operator, mutates_args=())
    made.register_fake(operator)
    made.register_autograd(_backward(formula)[0], setup_context=_backward(formula)[1])
    return made


def local_energy(x, weight):
    """``out[b, t] = sum over c of weight[c] * (x[b, c, t-1] + 2 x[b, c, t] + x[b, c, t+1])``, zeros outside."""
    padded = torch.nn.functional.pad(x, (1, 1))
    smooth = padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
    return torch.einsum("bct,c->bt", smooth, weight)


LOCAL_ENERGY = define("local_energy", local_energy, ["x", "weight"])
ROW_MAX = define("row_max", lambda x: x.amax(1), ["x"])
PRODUCT = define("product", lambda a, b: a @ b, ["a", "b"])
SQUARES = define("squares", lambda x: x * x.sum(-1, keepdim=True), ["x"])
