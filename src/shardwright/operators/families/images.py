"""Resampling, patches and shuffles of images: free along batch and channels, positions where index arithmetic allows."""

from __future__ import annotations

from typing import Any

from shardwright.operators.language import Expression, Opaque, TensorArgument
from shardwright.operators.record import describes, known
from shardwright.operators.samples import positive, reals

ALL = slice(None)

_MODES = {
    1: ("upsample_nearest1d", "upsample_linear1d", "_upsample_nearest_exact1d"),
    2: (
        "upsample_nearest2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_nearest_exact2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
    ),
    3: ("upsample_nearest3d", "upsample_trilinear3d", "_upsample_nearest_exact3d"),
}


def planes(x: TensorArgument) -> Any:
    """Some function of every plane of its own."""
    return lambda n, c, *p: Opaque(x[(n, c, *(ALL,) * (x.rank - 2))])


for _names in _MODES.values():
    for _name in _names:
        describes(f"aten.{_name}.default", f"aten.{_name}.vec", kind="other")(planes)


@describes("aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default", kind="gather")
def grid_sampler(x: TensorArgument, grid: TensorArgument) -> Any:
    return lambda n, c, *p: Opaque(x[(n, c, *(ALL,) * (x.rank - 2))], grid[(n, *p, ALL)])


@describes("aten.affine_grid_generator.default", kind="other")
def affine_grid(theta: TensorArgument) -> Any:
    return lambda n, *p: Opaque(theta[n, ALL, ALL])


@describes("aten.im2col.default", kind="copy")
def im2col(x: TensorArgument, kernel: Any) -> Any:
    """Every input channel becomes a block of columns, one for each position in the window."""
    area = kernel[0] * kernel[1]
    if x.rank == 3:
        return lambda o, p: x[o // area, ALL, ALL] * 1
    return lambda n, o, p: x[n, o // area, ALL, ALL] * 1


@describes("aten.col2im.default", kind="copy")
def col2im(x: TensorArgument, output_size: Any, kernel: Any) -> Any:
    """Free along the batch; the columns of one channel lie together."""
    if x.rank != 3:
        return None
    return lambda n, c, *p: x[n, ALL, ALL] * 1


@describes("aten.pixel_shuffle.default", kind="view")
def pixel_shuffle(x: TensorArgument, factor: int) -> Any:
    def element(*i: Any) -> Expression:
        *lead, c, y, z = i
        return x[(*lead, c * factor * factor + (y % factor) * factor + z % factor, y // factor, z // factor)]

    return element


@describes("aten.pixel_unshuffle.default", kind="view")
def pixel_unshuffle(x: TensorArgument, factor: int) -> Any:
    def element(*i: Any) -> Expression:
        *lead, c, y, z = i
        inner = c % (factor * factor)
        return x[(*lead, c // (factor * factor), y * factor + inner // factor, z * factor + inner % factor)]

    return element


@describes("aten.channel_shuffle.default", "aten.native_channel_shuffle.default", kind="copy")
def channel_shuffle(x: TensorArgument, groups: int) -> Any:
    return lambda n, c, *p: x[(n, ALL, *p)] * 1


@describes("aten.prelu.default", "aten._prelu_kernel.default", kind="elementwise")
def prelu(x: TensorArgument, weight: TensorArgument) -> Any:
    if weight.rank == x.rank:
        return lambda *i: Opaque(x[i], weight.at(i))
    return lambda *i: Opaque(
        x[i], weight[(i[1],)] if weight.shape and weight.shape[0] > 1 else weight[(0,) * weight.rank]
    )


@describes("aten.feature_dropout.default", "aten.feature_alpha_dropout.default", kind="random")
def feature_dropout(x: TensorArgument) -> Any:
    return lambda *i: Opaque(x[(*i[:2], *(ALL,) * (x.rank - 2))])


known(
    "aten.upsample_nearest2d.vec",
    "aten._upsample_nearest_exact2d.vec",
    samples=lambda n, c: [(reals(n, c, 5, 6), None, (2.0, 2.0))],
)
known(
    "aten.upsample_bilinear2d.vec",
    "aten.upsample_bicubic2d.vec",
    "aten._upsample_bilinear2d_aa.vec",
    "aten._upsample_bicubic2d_aa.vec",
    samples=lambda n, c: [(reals(n, c, 5, 6), (10, 9), False, None)],
)
known(
    "aten.upsample_bilinear2d.default",
    "aten.upsample_bicubic2d.default",
    "aten._upsample_bilinear2d_aa.default",
    "aten._upsample_bicubic2d_aa.default",
    samples=lambda n, c: [(reals(n, c, 5, 6), (10, 9), False)],
)
known(
    "aten.upsample_nearest2d.default",
    "aten._upsample_nearest_exact2d.default",
    samples=lambda n, c: [(reals(n, c, 5, 6), (10, 9))],
)
known(
    "aten.upsample_nearest1d.default",
    "aten._upsample_nearest_exact1d.default",
    samples=lambda n, c: [(reals(n, c, 5), (10,))],
)
known(
    "aten.upsample_nearest1d.vec",
    "aten._upsample_nearest_exact1d.vec",
    samples=lambda n, c: [(reals(n, c, 5), (10,), None)],
)
known("aten.upsample_linear1d.default", samples=lambda n, c: [(reals(n, c, 5), (10,), False)])
known("aten.upsample_linear1d.vec", samples=lambda n, c: [(reals(n, c, 5), (10,), False, None)])
known(
    "aten.upsample_nearest3d.default",
    "aten._upsample_nearest_exact3d.default",
    samples=lambda n, c: [(reals(n, c, 2, 3, 2), (4, 4, 4))],
)
known(
    "aten.upsample_nearest3d.vec",
    "aten._upsample_nearest_exact3d.vec",
    samples=lambda n, c: [(reals(n, c, 2, 3, 2), (4, 4, 4), None)],
)
known("aten.upsample_trilinear3d.default", samples=lambda n, c: [(reals(n, c, 2, 3, 2), (4, 4, 4), False)])
known("aten.upsample_trilinear3d.vec", samples=lambda n, c: [(reals(n, c, 2, 3, 2), (4, 4, 4), False, None)])
known(
    "aten.grid_sampler.default",
    "aten.grid_sampler_2d.default",
    samples=lambda n, c, h: [(reals(n, c, 5, 6), positive(n, h, 7, 2), 0, 0, False)],
)
known(
    "aten.grid_sampler_3d.default",
    samples=lambda n, c, h: [(reals(n, c, 3, 3, 3), positive(n, h, 2, 2, 3), 0, 0, False)],
)
known("aten.affine_grid_generator.default", samples=lambda n: [(reals(n, 2, 3), (n, 3, 4, 5), False)])
known("aten.im2col.default", samples=lambda n, c: [(reals(n, c, 6, 6), (3, 2), (1, 1), (1, 1), (1, 1))])
known("aten.col2im.default", samples=lambda n, c: [(reals(n, c * 4, 9), (6, 6), (2, 2), (1, 1), (0, 0), (2, 2))])
known("aten.pixel_shuffle.default", samples=lambda n, c, h: [(reals(n, 4 * c, h, h + 1), 2)])
known("aten.pixel_unshuffle.default", samples=lambda n, c, h: [(reals(n, c, 2 * h, 2 * h), 2)])
known(
    "aten.channel_shuffle.default",
    "aten.native_channel_shuffle.default",
    samples=lambda n, c: [(reals(n, 3 * c, 4, 4, grad=False), 3)],
)
known("aten.prelu.default", samples=lambda n, c, h: [(reals(n, c, h), reals(c)), (reals(n, c), reals(1))])
