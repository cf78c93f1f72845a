"""One rule for every element-wise operator, broadcasting included.

PyTorch tags operators whose output element depends on one element of each (broadcast) input; a few are known here by name.
The linear ones are written out, so that unreduced sums may pass through them; all others are just some function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.graph import Atom, Op
from shardwright.operators.language import Expression, TensorArgument, call, where
from shardwright.operators.registry import Description

WIDTH = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}

RANDOM = frozenset(
    {
        "dropout",
        "alpha_dropout",
        "bernoulli",
        "native_dropout",
        "rand_like",
        "randn_like",
        "randint_like",
        "normal_functional",
        "uniform",
        "rrelu",
        "rrelu_with_noise_functional",
        "normal",
        "exponential",
        "poisson",
        "multinomial_like",
        "feature_dropout",
    }
) - {"feature_dropout", "multinomial_like"}
LIKE = frozenset({"zeros_like", "ones_like", "empty_like", "full_like"})
COPY = frozenset(
    {
        "clone",
        "contiguous",
        "to",
        "_to_copy",
        "alias",
        "detach",
        "lift_fresh_copy",
        "lift",
        "view_as",
        "type_as",
        "positive",
        "copy",
        "_conj_physical",
        "detach_copy",
        "alias_copy",
        "_conj",
        "conj",
        "resolve_conj",
        "resolve_neg",
        "cpu",
        "cuda",
        "float",
        "half",
        "double",
        "_neg_view",
        "view_dtype",
        "_autocast_to_reduced_precision",
        "_autocast_to_full_precision",
    }
)
BY_NAME = frozenset(
    {
        "gelu",
        "silu",
        "relu",
        "relu6",
        "hardtanh",
        "hardswish",
        "leaky_relu",
        "elu",
        "celu",
        "selu",
        "mish",
        "prelu_scalar",
        "masked_fill",
        "where",
        "logical_not",
        "clamp",
        "nan_to_num",
        "floor_divide",
        "_assert_async",
        "__and__",
        "__or__",
        "__xor__",
        "bitwise_not",
        "threshold",
        "square",
        "true_divide",
        "rsub",
        "softplus",
        "log_sigmoid",
        "sigmoid",
        "isfinite",
        "isinf",
        "isnan",
        "isposinf",
        "isneginf",
        "fill",
        "float_power",
        "arctan2",
        "absolute",
        "isreal",
        "ldexp",
        "xlogy",
        "multiply",
        "subtract",
        "divide",
        "negative",
        "greater",
        "less",
        "greater_equal",
        "less_equal",
        "not_equal",
        "logaddexp",
        "dist_elementwise",
        "special_expit",
        "special_erf",
        "isclose",
        "fake_quantize_per_tensor_affine",
        "hardsigmoid",
        "logsigmoid",
        "softshrink",
        "hardshrink",
        "tanhshrink",
        "softsign",
        "__lshift__",
        "__rshift__",
        "_weight_norm_elementwise",
        "swish",
        "real",
        "imag",
        "angle",
        "sgn",
        "complex",
        "polar",
        "view_as_real_elementwise",
        "log_sigmoid_forward",
        "glu_elementwise",
    }
)

Form = Callable[[list[Expression], dict[str, Any]], Expression]

LINEAR: dict[str, Form] = {
    "add": lambda x, a: x[0] + x[1] if len(x) > 1 else call("add", *x),
    "sub": lambda x, a: x[0] - x[1] if len(x) > 1 else call("sub", *x),
    "mul": lambda x, a: x[0] * (x[1] if len(x) > 1 else 2),
    "multiply": lambda x, a: x[0] * (x[1] if len(x) > 1 else 2),
    "div": lambda x, a: call("div", *x) if a.get("rounding_mode") else x[0] / (x[1] if len(x) > 1 else 2),
    "true_divide": lambda x, a: x[0] / (x[1] if len(x) > 1 else 2),
    "neg": lambda x, a: -x[0],
    "masked_fill": lambda x, a: where(x[1], x[0], x[2] if len(x) > 2 else 0) if a.get("value") == 0 else call("f", *x),
    "addcmul": lambda x, a: x[0] + x[1] * x[2],
    "addcdiv": lambda x, a: x[0] + x[1] / x[2],
}


def base_name(target: str) -> str:
    """``aten.add.Tensor`` → ``add``."""
    return target.split(".")[1] if target.count(".") >= 2 else target


def is_elementwise(target: str) -> bool:
    """Whether one output element depends on one element of each input."""
    import torch

    from shardwright._torch_compat import operator

    name = base_name(target)
    if target.startswith("aten.") and name in COPY | BY_NAME | RANDOM | LIKE:
        return True
    try:
        return torch.Tag.pointwise in operator(target).tags
    except (AttributeError, ValueError, RuntimeError):
        return False


def kind_of(name: str) -> str:
    if name in RANDOM:
        return "random"
    if name in LIKE:
        return "creation"
    return "copy" if name in COPY else "elementwise"


def description(
    op: Op, inputs: Sequence[TensorArgument], shapes: Sequence[tuple[int, ...] | None]
) -> Description | None:
    """The element-wise description of an operator, or ``None`` where the rule does not hold for it."""
    if not inputs or not is_elementwise(op.target) or any(not _fits(inputs, shape) for shape in shapes):
        return None
    name = base_name(op.target)

    def body(index: tuple[Any, ...], arguments: dict[str, Any]) -> Expression:
        elements: list[Expression] = [x.at(index) for x in inputs]
        if name in COPY and _keeps_values(op, inputs):
            return elements[0] * 1
        if name == "where" and len(elements) == 3:
            return where(*elements)
        if name in LINEAR:
            return LINEAR[name](elements, arguments)
        return call(name, *elements)

    def function(*, out: Any = None, rounding_mode: Any = None, value: Any = None) -> Any:
        arguments = {"rounding_mode": rounding_mode, "value": value}
        return tuple(lambda *i: body(i, arguments) for _ in shapes)

    return Description(op.target, function, kind_of(name))


def _keeps_values(op: Op, inputs: Sequence[TensorArgument]) -> bool:
    """A copy that rounds to a narrower type is not linear."""
    wanted = [v.value for v in (*op.args, *(v for _, v in op.kwargs)) if isinstance(v, Atom) and v.kind == "dtype"]
    if base_name(op.target) in ("type_as", "copy", "float", "half", "double", "cuda", "cpu"):
        return False
    return all(WIDTH.get(d, 0) >= WIDTH.get(inputs[0].dtype, 9) for d in wanted)


def _fits(inputs: Sequence[TensorArgument], shape: tuple[int, ...] | None) -> bool:
    """Whether every input broadcasts to the output's shape."""
    if shape is None:
        return True
    for x in inputs:
        if len(x.shape) > len(shape):
            return False
        for extent, full in zip(reversed(x.shape), reversed(shape), strict=False):
            if extent not in (1, full):
                return False
    return True
