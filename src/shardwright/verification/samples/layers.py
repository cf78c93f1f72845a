"""Samples of normalisations, convolutions, pooling, attention, embeddings, creation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.verification.samples.core import Pick, bools, ints, positive, sample, t


@sample("aten.layer_norm.default")
def layer_norm(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), (c,), t(c), t(c), 1e-5
    yield t(a, b, c), (b, c), t(b, c), None, 1e-5
    yield t(a, b, c), (c,)


@sample("aten.native_layer_norm.default")
def native_layer_norm(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), (c,), t(c), t(c), 1e-5


@sample("aten.rms_norm.default", "aten._fused_rms_norm.default")
def rms_norm(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), (c,), t(c), 1e-5


@sample("aten.group_norm.default")
def group_norm(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, 4 * c, h, h), 4, t(4 * c), t(4 * c)
    yield t(n, 2 * c, h), c


@sample("aten.native_group_norm.default")
def native_group_norm(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, 2 * c, h), t(2 * c), t(2 * c), n, 2 * c, h, c, 1e-5


@sample("aten._native_batch_norm_legit_functional.default")
def batch_norm_functional(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, h, h), t(c), t(c), t(c, grad=False), positive(c, grad=False), True, 0.1, 1e-5
    yield t(n, c, h), t(c), t(c), t(c, grad=False), positive(c, grad=False), False, 0.1, 1e-5
    yield t(n, c), None, None, t(c, grad=False), positive(c, grad=False), True, 0.1, 1e-5


@sample("aten._native_batch_norm_legit_no_training.default")
def batch_norm_inference(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, h), t(c), t(c), t(c, grad=False), positive(c, grad=False), 0.1, 1e-5


@sample("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, h), t(c), t(c), True, 0.1, 1e-5


@sample("aten.batch_norm.default")
def batch_norm(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, h), t(c), t(c), t(c, grad=False), positive(c, grad=False), False, 0.1, 1e-5, False
    yield t(n, c, h), t(c), t(c), None, None, True, 0.1, 1e-5, False


@sample("aten.instance_norm.default")
def instance_norm(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, h), t(c), t(c), None, None, True, 0.1, 1e-5, False


@sample("aten.scaled_dot_product_attention.default")
def attention(pick: Pick) -> Iterator[Any]:
    b, h, i, e = pick(4)
    yield t(b, h, i, e), t(b, h, i, e), t(b, h, i, e), None, 0.0, True
    yield t(b, 4 * h, i, e), t(b, h, i, e), t(b, h, i, e), None, 0.0, True, {"enable_gqa": True}
    yield t(b, h, i, e), t(b, h, i + 1, e), t(b, h, i + 1, e + 1), t(b, 1, i, i + 1)
    yield t(b, h, i, e), t(b, h, i, e), t(b, h, i, e), bools(i, i), 0.0, False, {"scale": 0.3}
    yield t(b, i, e), t(b, i, e), t(b, i, e)


@sample("aten.embedding.default")
def embedding(pick: Pick) -> Iterator[Any]:
    v, d, a, b = pick(4)
    yield t(v, d), ints(a, b, below=v)
    yield t(v, d), ints(a, below=v), 2


@sample("aten.conv1d.default")
def conv1d(pick: Pick) -> Iterator[Any]:
    n, c, o = pick(3)
    yield t(n, c, 24), t(o, c, 3), t(o), (1,), (1,)


@sample("aten.conv2d.default")
def conv2d(pick: Pick) -> Iterator[Any]:
    n, c, o = pick(3)
    h = 13 + n % 2
    yield t(2, c, h, h), t(o, c, 3, 3), t(o), (1, 1), (1, 1)
    yield t(n, 3, 23, 23), t(o, 3, 5, 5), t(o), (2, 2), (2, 2)
    yield t(2, 4 * 2, h, h), t(4 * 3, 2, 3, 3), t(12), (1, 1), (1, 1), (1, 1), 4
    yield t(2, c, h, h), t(c, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), c
    yield t(2, c, 4 * n, 4 * n), t(o, c, 4, 4), t(o), (4, 4)
    yield t(2, c, 17, 17), t(o, c, 3, 3), None, (1, 1), (2, 2), (2, 2)
    yield t(c, h, h), t(o, c, 3, 3), t(o), (1, 1), (0, 1)


@sample("aten.conv2d.padding")
def conv2d_padding(pick: Pick) -> Iterator[Any]:
    n, c, o = pick(3)
    yield t(n, c, 16, 16), t(o, c, 3, 4), t(o), (1, 1), "same"
    yield t(n, c, 16, 16), t(o, c, 3, 3), t(o), (1, 1), "valid"


@sample("aten.conv1d.padding")
def conv1d_padding(pick: Pick) -> Iterator[Any]:
    n, c, o = pick(3)
    yield t(n, c, 16), t(o, c, 3), t(o), (1,), "same"


@sample("aten.conv3d.padding")
def conv3d_padding(pick: Pick) -> Iterator[Any]:
    _, c, o = pick(3)
    yield t(2, c, 9, 9, 9), t(o, c, 3, 3, 3), t(o), (1, 1, 1), "same"


@sample("aten.conv3d.default")
def conv3d(pick: Pick) -> Iterator[Any]:
    _n, c, o = pick(3)
    yield t(2, c, 9, 9, 9), t(o, c, 3, 3, 3), t(o), (1, 1, 1), (1, 1, 1)


@sample("aten.convolution.default")
def convolution(pick: Pick) -> Iterator[Any]:
    n, c, o = pick(3)
    yield t(n, c, 14, 14), t(o, c, 3, 3), t(o), (1, 1), (1, 1), (1, 1), False, (0, 0), 1
    yield t(n, c, 6, 6), t(c, o, 3, 3), t(o), (2, 2), (1, 1), (1, 1), True, (0, 0), 1


@sample("aten.conv_transpose1d.default")
def conv_transpose1d(pick: Pick) -> Iterator[Any]:
    n, c, o = pick(3)
    yield t(n, c, 8), t(c, o, 3), t(o), (2,)


@sample("aten.conv_transpose2d.input")
def conv_transpose2d(pick: Pick) -> Iterator[Any]:
    n, c, o = pick(3)
    yield t(n, c, 6, 6), t(c, o, 3, 3), t(o), (2, 2), (1, 1)
    yield t(n, 8, 6, 6), t(8, 3, 3, 3), t(12), (2, 2), (1, 1), (0, 0), 4


@sample("aten.conv_transpose3d.input")
def conv_transpose3d(pick: Pick) -> Iterator[Any]:
    _n, c, o = pick(3)
    yield t(2, c, 3, 3, 3), t(c, o, 3, 3, 3), t(o)


@sample("aten.max_pool2d.default")
def max_pool2d(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 2 * h, 2 * h), (2, 2)
    yield t(2, c, 4 * h, 4 * h), (3, 3), (2, 2), (1, 1)
    yield t(2, c, 4 * h, 4 * h), (3, 3), (2, 2), (0, 0), (1, 1), True


@sample("aten.max_pool1d.default")
def max_pool1d(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 3 * h), (3,), (2,), (1,)


@sample("aten.max_pool3d.default")
def max_pool3d(pick: Pick) -> Iterator[Any]:
    _n, c, _ = pick(3)
    yield t(2, c, 8, 8, 8), (3, 3, 3), (1, 1, 1), (1, 1, 1)


@sample("aten.avg_pool2d.default")
def avg_pool2d(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 2 * h, 2 * h), (2, 2)
    yield t(2, c, 4 * h, 4 * h), (3, 3), (1, 1), (1, 1)
    yield t(2, c, 4 * h, 4 * h), (3, 3), (2, 2), (1, 1), False, False
    yield t(2, c, 4 * h, 4 * h), (3, 3), (2, 2), (1, 1), True, True
    yield t(2, c, h, h), (h, h)
    yield t(2, c, 4 * h, 4 * h), (3, 3), (1, 1), (1, 1), False, True, 5


@sample("aten.avg_pool1d.default")
def avg_pool1d(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 3 * h), (3,), (1,), (1,)


@sample("aten.avg_pool3d.default")
def avg_pool3d(pick: Pick) -> Iterator[Any]:
    _n, c, _ = pick(3)
    yield t(2, c, 8, 8, 8), (3, 3, 3), (1, 1, 1), (1, 1, 1)


@sample("aten.max_pool2d_with_indices.default")
def max_pool2d_with_indices(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 2 * h, 2 * h), (2, 2)


@sample("aten.max_pool3d_with_indices.default")
def max_pool3d_with_indices(pick: Pick) -> Iterator[Any]:
    n, c, _ = pick(3)
    yield t(n, c, 4, 4, 4), (2, 2, 2)


@sample("aten.adaptive_avg_pool2d.default", "aten._adaptive_avg_pool2d.default")
def adaptive_avg_pool2d(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, h, h), (1, 1)
    yield t(n, c, 2 * h, 3 * h), (h, h)
    yield t(n, c, 13, 13), (6, 6)


@sample("aten.adaptive_avg_pool1d.default")
def adaptive_avg_pool1d(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 2 * h), (h,)
    yield t(n, c, h), (1,)


@sample("aten.adaptive_avg_pool3d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool3d(pick: Pick) -> Iterator[Any]:
    n, c, _ = pick(3)
    yield t(n, c, 4, 4, 4), (1, 1, 2)


@sample("aten.adaptive_max_pool1d.default")
def adaptive_max_pool1d(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 2 * h), (h,)


@sample("aten.adaptive_max_pool2d.default")
def adaptive_max_pool2d(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 2 * h, h), (h, 1)


@sample("aten.adaptive_max_pool3d.default")
def adaptive_max_pool3d(pick: Pick) -> Iterator[Any]:
    n, c, _ = pick(3)
    yield t(n, c, 4, 4, 4), (2, 2, 2)


@sample("aten.zeros.default", "aten.ones.default")
def zeros(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield ((a, b),)


@sample("aten.full.default")
def full(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield (a, b), 3.5


@sample("aten.new_zeros.default", "aten.new_ones.default")
def new_zeros(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(3), (a, b)
    yield t(a, c, b), (a, b)


@sample("aten.new_full.default")
def new_full(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(3), (a, b), 2.5


@sample("aten.scalar_tensor.default")
def scalar_tensor(pick: Pick) -> Iterator[Any]:
    yield (2.5,)


@sample("aten.arange.default")
def arange(pick: Pick) -> Iterator[Any]:
    yield (pick(1),)


@sample("aten.arange.start")
def arange_start(pick: Pick) -> Iterator[Any]:
    yield 2, 2 + pick(1)


@sample("aten.arange.start_step")
def arange_step(pick: Pick) -> Iterator[Any]:
    yield 2, 2 + 3 * pick(1), 3


@sample("aten.linspace.default")
def linspace(pick: Pick) -> Iterator[Any]:
    yield 0.0, 1.0, pick(1)


@sample("aten.eye.default")
def eye(pick: Pick) -> Iterator[Any]:
    yield (pick(1),)


@sample("aten.eye.m")
def eye_m(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield a, b


@sample("aten.one_hot.default")
def one_hot(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield ints(a, b, below=c), c
