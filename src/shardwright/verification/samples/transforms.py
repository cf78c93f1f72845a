"""Samples of recurrent layers, images, transforms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.verification.samples.core import Pick, complexes, positive, sample, t


def _recurrent(
    pick: Pick, gates: int, layers: int, biases: bool, directions: int = 1
) -> tuple[Any, list[Any], int, int, int]:
    b, i, h = pick(3)
    params = []
    for layer in range(layers):
        for _ in range(directions):
            params += [t(gates * h, i if layer == 0 else directions * h), t(gates * h, h)]
            params += [t(gates * h), t(gates * h)] if biases else []
    return (b, i, h), params, b, i, h


@sample("aten.lstm.input")
def lstm(pick: Pick) -> Iterator[Any]:
    for layers, biases, first in ((2, True, True), (1, False, False)):
        _, params, b, i, h = _recurrent(pick, 4, layers, biases)
        x = t(b, 3, i) if first else t(3, b, i)
        yield x, [t(layers, b, h), t(layers, b, h)], params, biases, layers, 0.0, True, False, first
    _, params, b, i, h = _recurrent(pick, 4, 1, True, 2)
    yield t(3, b, i), [t(2, b, h), t(2, b, h)], params, True, 1, 0.0, True, True, False


@sample("aten.gru.input")
def gru(pick: Pick) -> Iterator[Any]:
    _, params, b, i, h = _recurrent(pick, 3, 2, True)
    yield t(b, 3, i), t(2, b, h), params, True, 2, 0.0, True, False, True


@sample("aten.rnn_tanh.input", "aten.rnn_relu.input")
def rnn(pick: Pick) -> Iterator[Any]:
    _, params, b, i, h = _recurrent(pick, 1, 1, True)
    yield t(3, b, i), t(1, b, h), params, True, 1, 0.0, True, False, False


@sample("aten.lstm_cell.default")
def lstm_cell(pick: Pick) -> Iterator[Any]:
    b, i, h = pick(3)
    yield t(b, i), [t(b, h), t(b, h)], t(4 * h, i), t(4 * h, h), t(4 * h), t(4 * h)


@sample("aten.gru_cell.default")
def gru_cell(pick: Pick) -> Iterator[Any]:
    b, i, h = pick(3)
    yield t(b, i), t(b, h), t(3 * h, i), t(3 * h, h), t(3 * h), t(3 * h)


@sample("aten.rnn_tanh_cell.default", "aten.rnn_relu_cell.default")
def rnn_cell(pick: Pick) -> Iterator[Any]:
    b, i, h = pick(3)
    yield t(b, i), t(b, h), t(h, i), t(h, h), t(h), t(h)


@sample("aten.upsample_nearest2d.vec", "aten._upsample_nearest_exact2d.vec")
def nearest(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 5, 6), None, (2.0, 2.0)


@sample(
    "aten.upsample_bilinear2d.vec",
    "aten.upsample_bicubic2d.vec",
    "aten._upsample_bilinear2d_aa.vec",
    "aten._upsample_bicubic2d_aa.vec",
)
def bilinear(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 5, 6), (10, 9), False, None


@sample(
    "aten.upsample_bilinear2d.default",
    "aten.upsample_bicubic2d.default",
    "aten._upsample_bilinear2d_aa.default",
    "aten._upsample_bicubic2d_aa.default",
)
def bilinear_sized(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 5, 6), (10, 9), False


@sample("aten.upsample_nearest2d.default", "aten._upsample_nearest_exact2d.default")
def nearest_sized(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 5, 6), (10, 9)


@sample("aten.upsample_nearest1d.default", "aten._upsample_nearest_exact1d.default")
def nearest1(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 5), (10,)


@sample("aten.upsample_nearest1d.vec", "aten._upsample_nearest_exact1d.vec")
def nearest1_vec(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 5), (10,), None


@sample("aten.upsample_linear1d.default")
def linear1(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 5), (10,), False


@sample("aten.upsample_linear1d.vec")
def linear1_vec(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 5), (10,), False, None


@sample("aten.upsample_nearest3d.default", "aten._upsample_nearest_exact3d.default")
def nearest3(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 2, 3, 2), (4, 4, 4)


@sample("aten.upsample_nearest3d.vec", "aten._upsample_nearest_exact3d.vec")
def nearest3_vec(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 2, 3, 2), (4, 4, 4), None


@sample("aten.upsample_trilinear3d.default")
def trilinear(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 2, 3, 2), (4, 4, 4), False


@sample("aten.upsample_trilinear3d.vec")
def trilinear_vec(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 2, 3, 2), (4, 4, 4), False, None


@sample("aten.grid_sampler.default", "aten.grid_sampler_2d.default")
def grid_sampler(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 5, 6), positive(n, h, 7, 2), 0, 0, False


@sample("aten.grid_sampler_3d.default")
def grid_sampler3(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 3, 3, 3), positive(n, h, 2, 2, 3), 0, 0, False


@sample("aten.affine_grid_generator.default")
def affine_grid(pick: Pick) -> Iterator[Any]:
    n = pick(1)
    yield t(n, 2, 3), (n, 3, 4, 5), False


@sample("aten.im2col.default")
def im2col(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c, 6, 6), (3, 2), (1, 1), (1, 1), (1, 1)


@sample("aten.col2im.default")
def col2im(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c * 4, 9), (6, 6), (2, 2), (1, 1), (0, 0), (2, 2)


@sample("aten.pixel_shuffle.default")
def pixel_shuffle(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, 4 * c, h, h + 1), 2


@sample("aten.pixel_unshuffle.default")
def pixel_unshuffle(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, 2 * h, 2 * h), 2


@sample("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def channel_shuffle(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, 3 * c, 4, 4, grad=False), 3


@sample("aten.prelu.default")
def prelu(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, h), t(c)
    yield t(n, c), t(1)


@sample("aten._fft_c2c.default")
def fft_c2c(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield complexes(a, b), (1,), 0, True


@sample("aten._fft_r2c.default")
def fft_r2c(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), (1,), 0, True


@sample("aten._fft_c2r.default")
def fft_c2r(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield complexes(a, b), (1,), 0, 2 * b - 2


@sample(*(f"aten.fft_{name}.default" for name in ("fft", "ifft", "rfft", "irfft", "ihfft", "hfft")))
def fft(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), None, 0


@sample(
    *(f"aten.fft_{name}.default" for name in ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn"))
)
def fftn(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), None, (-2, -1)


@sample("aten.fft_fftshift.default", "aten.fft_ifftshift.default")
def fft_shift(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), (1,)


@sample(
    "aten.linalg_inv.default",
    "aten.inverse.default",
    "aten.linalg_det.default",
    "aten.det.default",
    "aten.linalg_matrix_exp.default",
    "aten.linalg_svdvals.default",
    "aten.linalg_slogdet.default",
    "aten.slogdet.default",
    "aten.linalg_qr.default",
)
def matrices(pick: Pick) -> Iterator[Any]:
    n = pick(1)
    yield (t(n, 3, 3),)


@sample("aten.matrix_power.default", "aten.linalg_matrix_power.default")
def matrix_power(pick: Pick) -> Iterator[Any]:
    n = pick(1)
    yield t(n, 3, 3), 2


@sample("aten.cdist.default")
def cdist(pick: Pick) -> Iterator[Any]:
    n, i, j, k = pick(4)
    yield t(n, i, k), t(n, j, k)


@sample("aten._cdist_forward.default")
def cdist_forward(pick: Pick) -> Iterator[Any]:
    n, i, j, k = pick(4)
    yield t(n, i, k), t(n, j, k), 2.0, None


@sample("aten.cosine_similarity.default")
def cosine_similarity(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), t(a, b)
    yield t(a, 1, b), t(1, a, b), 2


@sample("aten.pairwise_distance.default")
def pairwise_distance(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), t(a, b)


@sample("aten.tensordot.default")
def tensordot(pick: Pick) -> Iterator[Any]:
    a, b, c, d = pick(4)
    yield t(a, b, c), t(c, d, a), (2, 0), (0, 2)


@sample("aten.meshgrid.indexing")
def meshgrid_indexing(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield [t(a), t(b)], {"indexing": "ij"}
    yield [t(a), t(b)], {"indexing": "xy"}


@sample("aten.meshgrid.default")
def meshgrid(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield ([t(a), t(b)],)


@sample("aten.histc.default")
def histc(pick: Pick) -> Iterator[Any]:
    yield positive(pick(1), grad=False), 5, 0, 1


@sample("aten.trace.default")
def trace(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield (t(a, b),)


@sample("aten._weight_norm_interface.default")
def weight_norm(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), t(a, 1), 0
