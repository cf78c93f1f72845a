"""Normalisations: statistics over some dims, then an element-wise function. Cutting those dims exchanges the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.operators.language import Expression, Sum, TensorArgument, call
from shardwright.operators.registry import describes


def _moments(x: TensorArgument, read: Any, extents: Sequence[int]) -> tuple[Expression, Expression]:
    """Mean and mean squared deviation of ``read(*k)`` over ``extents``."""
    mean = Sum(lambda *m: read(*m), extents) * 0.5
    return mean, Sum(lambda *k: call("square", read(*k) - mean), extents) * 0.5


def _affine(normal: Expression, weight: TensorArgument | None, bias: TensorArgument | None, at: Any) -> Expression:
    if weight is not None:
        normal = normal * weight[at]
    return normal if bias is None else normal + bias[at]


@describes("aten.layer_norm.default", "aten.native_layer_norm.default", kind="normalisation")
def layer_norm(
    x: TensorArgument, normalized_shape: Sequence[int], weight: TensorArgument | None, bias: TensorArgument | None
) -> Any:
    lead = x.rank - len(normalized_shape)

    def statistics(i: tuple[Any, ...]) -> tuple[Expression, Expression]:
        return _moments(x, lambda *k: x[(*i[:lead], *k)], normalized_shape)

    def normal(*i: Any) -> Expression:
        mean, variance = statistics(i)
        return _affine((x[i] - mean) * call("rsqrt", variance), weight, bias, i[lead:])

    return normal, lambda *i: call("saved", statistics(i)[0]), lambda *i: call("rsqrt", statistics(i)[1])


@describes("aten.rms_norm.default", "aten._fused_rms_norm.default", kind="normalisation")
def rms_norm(x: TensorArgument, normalized_shape: Sequence[int], weight: TensorArgument | None) -> Any:
    lead = x.rank - len(normalized_shape)

    def scale(i: tuple[Any, ...]) -> Expression:
        return call("rsqrt", Sum(lambda *k: call("square", x[(*i[:lead], *k)]), normalized_shape))

    def normal(*i: Any) -> Expression:
        return _affine(x[i] * scale(i), weight, None, i[lead:])

    return normal, lambda *i: scale(i)


@describes("aten.native_group_norm.default", kind="normalisation")
def native_group_norm(x: TensorArgument, weight: Any, bias: Any, n: int, c: int, area: int, groups: int) -> Any:
    """It is told its sizes a second time; free along the batch."""
    wholes = [w[slice(None),] for w in (weight, bias) if w is not None]

    def sample(i: Any) -> Expression:
        return call("moments", x[(i, *(slice(None),) * (x.rank - 1))])

    return lambda i, *p: call("normal", sample(i), *wholes), lambda i, g: sample(i), lambda i, g: sample(i)


@describes("aten.group_norm.default", kind="normalisation")
def group_norm(x: TensorArgument, groups: int, weight: TensorArgument | None, bias: TensorArgument | None) -> Any:
    size = x.shape[1] // groups

    def normal(*i: Any) -> Expression:
        def read(c: Any, *p: Any) -> Expression:
            return x[(i[0], i[1] // size * size + c, *p)]

        mean, variance = _moments(x, read, (size, *x.shape[2:]))
        return _affine((x[i] - mean) * call("rsqrt", variance), weight, bias, (i[1],))

    return normal


def batch_statistics(x: TensorArgument, channel: Any) -> tuple[Expression, Expression]:
    """Mean and variance of one channel over batch and positions."""
    return _moments(x, lambda n, *k: x[(n, channel, *k)], (x.shape[0], *x.shape[2:]))


def _batch_norm(
    x: TensorArgument, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float
) -> Any:
    def moments(channel: Any) -> tuple[Expression, Expression]:
        return batch_statistics(x, channel) if training or mean is None else (mean[channel], variance[channel])

    def normal(*i: Any) -> Expression:
        m, v = moments(i[1])
        return _affine((x[i] - m) * call("rsqrt", v), weight, bias, (i[1],))

    saved = (
        (lambda i1: call("saved", moments(i1)[0]), lambda i1: call("rsqrt", moments(i1)[1]))
        if training
        else (None, None)
    )
    if mean is None:
        return normal, *saved
    if not training:
        return normal, *saved, lambda i1: mean[i1] * 1, lambda i1: variance[i1] * 1
    return (
        normal,
        *saved,
        lambda i1: call("blend", mean[i1], moments(i1)[0]),
        lambda i1: call("blend", variance[i1], moments(i1)[1]),
    )


@describes("aten._native_batch_norm_legit_functional.default", kind="normalisation")
def batch_norm_functional(
    x: TensorArgument, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float
) -> Any:
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum)


@describes("aten._native_batch_norm_legit_no_training.default", kind="normalisation")
def batch_norm_inference(x: TensorArgument, weight: Any, bias: Any, running_mean: Any, running_var: Any) -> Any:
    return _batch_norm(x, weight, bias, running_mean, running_var, False, 0.0)[:1]


@describes("aten._native_batch_norm_legit.no_stats", kind="normalisation")
def batch_norm_no_stats(x: TensorArgument, weight: Any, bias: Any, training: bool, momentum: float) -> Any:
    return _batch_norm(x, weight, bias, None, None, True, momentum)[:3]


@describes("aten.batch_norm.default", kind="normalisation")
def batch_norm(
    x: TensorArgument, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float
) -> Any:
    """Only without running statistics or in inference is it functional; training with statistics is the functional one."""
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum)[0]


@describes("aten.instance_norm.default", kind="normalisation")
def instance_norm(
    x: TensorArgument, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool
) -> Any:
    if running_mean is not None:
        return None

    def normal(*i: Any) -> Expression:
        mean, variance = _moments(x, lambda *k: x[(i[0], i[1], *k)], x.shape[2:])
        return _affine((x[i] - mean) * call("rsqrt", variance), weight, bias, (i[1],))

    return normal
