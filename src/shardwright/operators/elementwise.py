"""One rule for every element-wise operator, broadcasting included.

PyTorch tags operators whose output element depends on one element of each (broadcast) input; a few are known here by name.
The linear ones are written out, so that unreduced sums may pass through them; all others are just some function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.graph import Atom, Op
from shardwright.operators.language import Expression, TensorArgument, call, where
from shardwright.operators.record import OperatorRecord

WIDTH = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


RANDOM = _names(
    "alpha_dropout bernoulli dropout exponential native_dropout normal normal_functional poisson rand_like randint_like "
    "randn_like rrelu rrelu_with_noise_functional uniform"
)
LIKE = _names("empty_like full_like ones_like zeros_like")
COPY = _names(
    "_autocast_to_full_precision _autocast_to_reduced_precision _conj _conj_physical _neg_view _to_copy alias alias_copy "
    "clone conj contiguous copy cpu cuda detach detach_copy lift lift_fresh_copy positive resolve_conj resolve_neg "
    "to type_as"
)
UNTAGGED = _names(
    "__and__ __lshift__ __or__ __rshift__ __xor__ absolute angle arctan2 celu complex divide elu "
    "fake_quantize_per_tensor_affine fill floor_divide gelu greater greater_equal hardshrink hardsigmoid hardswish hardtanh "
    "imag isclose isfinite isinf isnan isreal ldexp leaky_relu less less_equal log_sigmoid log_sigmoid_forward masked_fill "
    "mish multiply negative not_equal polar real relu rsub softplus softshrink special_erf special_expit subtract threshold "
    "true_divide where"
)
"""Element-wise operators whose overloads PyTorch does not all tag."""

Form = Callable[[list[Expression], dict[str, Any]], Expression]

LINEAR: dict[str, Form] = {
    "add": lambda x, a: x[0] + x[1] if len(x) > 1 else call("add", *x),
    "sub": lambda x, a: x[0] - x[1] if len(x) > 1 else call("sub", *x),
    "mul": lambda x, a: x[0] * (x[1] if len(x) > 1 else 2),
    "multiply": lambda x, a: x[0] * (x[1] if len(x) > 1 else 2),
    "div": lambda x, a: call("div", *x) if a.get("rounding_mode") else x[0] / (x[1] if len(x) > 1 else 2),
    "true_divide": lambda x, a: x[0] / (x[1] if len(x) > 1 else 2),
    "neg": lambda x, a: -x[0],
    "masked_fill": lambda x, a: x[0] * call("kept", x[1]) if a.get("value") == 0 else call("masked_fill", *x),
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
    if target.startswith("aten.") and name in COPY | UNTAGGED | RANDOM | LIKE:
        return True
    try:
        return torch.Tag.pointwise in operator(target).tags
    except (AttributeError, ValueError, RuntimeError):
        return False


def comparable(target: str) -> bool:
    """Whether two calls give the same: not where numbers are drawn, or memory is left as it is."""
    return base_name(target) not in RANDOM | {"empty_like"}


def kind_of(name: str) -> str:
    if name in RANDOM:
        return "random"
    if name in LIKE:
        return "creation"
    return "copy" if name in COPY else "elementwise"


def description(
    op: Op, inputs: Sequence[TensorArgument], shapes: Sequence[tuple[int, ...] | None]
) -> OperatorRecord | None:
    """What the element-wise rule says of an operator, or ``None`` where the rule does not hold for it."""
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

    return OperatorRecord(function, kind_of(name))


def _keeps_values(op: Op, inputs: Sequence[TensorArgument]) -> bool:
    """A copy that rounds to a narrower type is not linear."""
    wanted = [v.value for v in (*op.args, *(v for _, v in op.kwargs)) if isinstance(v, Atom) and v.kind == "dtype"]
    if base_name(op.target) in ("type_as", "copy"):
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
