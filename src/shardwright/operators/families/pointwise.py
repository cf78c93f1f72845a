"""What element-wise operators and copies cost; what they compute is :mod:`~shardwright.operators.elementwise`."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.graph import Op, Tensor
from shardwright.graph.core import DTYPE_BYTES, Atom
from shardwright.operators.record import HostClass, known
from shardwright.operators.samples import bools, reals
from shardwright.operators.work import Kernels, LocalOp, Work, kept_dims, memory_kernels, memory_work, summed


def _forward(local: LocalOp) -> Work:
    """An operator of two tensors. Where one is repeated along some dims, as a scale of every row is, positions are computed
    number by number, which costs more than the bytes; more so where both are."""
    plain = memory_work(f"{local.name}/forward", local.dtype, local.bytes)
    out = local.outputs[0]
    repeated = [1 < tensor.elements < out.elements for tensor in local.inputs]
    if sum(repeated) == 0:
        return plain
    kind = "broadcast" if sum(repeated) < len(repeated) else "crossed"
    return memory_work(f"{kind}/forward", local.dtype, local.bytes, instead=plain)


def _backward(local: LocalOp, products: bool) -> list[Work]:
    """Each input's gradient is one product (none for sums); a broadcast input's is summed over what was broadcast."""
    out, found = local.output_bytes, []
    size = DTYPE_BYTES[local.dtype]
    for index, tensor in enumerate(local.inputs):
        if not tensor.grad:
            continue
        if products:
            found.append(memory_work("mul/forward", local.dtype, 3 * out))
        if tensor.elements < local.outputs[0].elements:
            moved = out + local.elements(index) * size
            found.append(summed(local.dtype, moved, local.output_shapes[0], kept_dims(tensor, local.outputs[0])))
    return found


def _sum_kernels(local: LocalOp) -> Kernels:
    forward = [_forward(local)] if len(local.inputs) > 1 else memory_kernels(local)[0]
    return forward, _backward(local, products=False) if any(t.grad for t in local.inputs) else []


def _product_kernels(local: LocalOp) -> Kernels:
    if len(local.inputs) < 2:
        return memory_kernels(local)
    return [_forward(local)], _backward(local, products=True) if any(t.grad for t in local.inputs) else []


def _scale_kernels(local: LocalOp) -> Kernels:
    """By a number, the gradient is what the result is: another product."""
    if len(local.inputs) > 1:
        return _product_kernels(local)
    forward, backward = memory_kernels(local)
    return forward, forward if backward else []


def _keeps_type(op: Op, tensors: Sequence[Tensor], output: Tensor | None) -> bool:
    casts = output is not None and bool(tensors) and tensors[0].dtype == output.dtype
    return casts and not any(isinstance(a, Atom) and a.kind == "memory_format" for a in op.args)


known("aten.add", "aten.sub", "aten.rsub", kernels=_sum_kernels, issued=HostClass("add", sums=True))
known("aten.maximum", "aten.minimum", "aten.where", "aten.pow", kernels=_product_kernels)
known("aten.mul", "aten.div", kernels=_scale_kernels, issued=HostClass("mul", gradients=1, sums=True))
known("aten.clone", kernels=lambda local: (memory_kernels(local)[0], []))
known("aten.contiguous", measured="copy", kernels=lambda local: ([], []))
known("aten._to_copy", measured="to")
known("aten.to", "aten.type_as", hands_on=_keeps_type)
known("aten.detach", "aten.alias", "aten.lift_fresh_copy", hands_on=lambda op, tensors, output: True)


known("aten.clamp.default", "aten.clip.default", samples=lambda a, b: [(reals(a, b), -0.5, 0.5)])
known("aten.clamp.Tensor", "aten.clip.Tensor", samples=lambda a, b: [(reals(a, b), reals(b), reals(a, 1))])
known(
    "aten.div.Tensor_mode",
    "aten.divide.Tensor_mode",
    samples=lambda a, b: [
        (reals(a, b), reals(b), {"rounding_mode": "floor"}),
        (reals(a, b), reals(b), {"rounding_mode": None}),
    ],
)
known(
    "aten.div.Scalar_mode",
    "aten.divide.Scalar_mode",
    samples=lambda a, b: [(reals(a, b), 0.3, {"rounding_mode": "trunc"})],
)
known("aten.masked_fill.Tensor", samples=lambda a, b: [(reals(a, b), bools(b), reals())])
known(
    "aten.masked_fill.Scalar",
    samples=lambda a, b: [(reals(a, b), bools(b), 0.0), (reals(a, b), bools(a, 1), float("-inf"))],
)
known("aten.where.self", samples=lambda a, b: [(bools(a, b), reals(a, b), reals(b))])


known("aten.detach", "aten.alias", alias=True)
known("aten.detach", "aten.alias", "aten.clone", "aten._to_copy", "aten.copy", "aten._conj", any_strides=True)
known("aten.masked_fill", "aten.where", any_strides=True)
known("aten.relu", "aten.leaky_relu", "aten.abs", decides="zero")


known("aten._fused_adamw_", "aten._fused_adam_", "aten._fused_sgd_", "aten._fused_adagrad_", updates_lists=True)
for _name in ("normal", "uniform", "bernoulli", "exponential", "random", "cauchy", "log_normal", "geometric"):
    known(f"aten.{_name}_", python={f"{_name}_": "filled"})
known("aten.normal", python={"normal": "created"})
known("aten.bernoulli", python={"bernoulli": "chosen"})
