"""Samples of views, joins and paddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwright.verification.samples.core import Pick, complexes, sample, t


@sample("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.view_copy.default")
def view(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), (a * b, c)
    yield t(a, b, c), (a, b * c)
    yield t(a, b, c), (a * b * c,)
    yield t(a * b, c), (a, b, 1, c)
    yield t(a, b * c), (a, b, c)
    yield t(a, 1, c), (a, c)
    yield t(a, b * c), (a * b, c)
    yield t(a, b, 2, c), (a, 2 * b, c)


@sample("aten.flatten.using_ints")
def flatten(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), 0, 1
    yield t(a, b, c), 1, -1


@sample("aten.unflatten.int")
def unflatten(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b * c), 1, (b, c)


@sample(
    "aten.ravel.default",
    "aten.squeeze.default",
    "aten.atleast_1d.default",
    "aten.atleast_2d.default",
    "aten.atleast_3d.default",
)
def ravel(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield (t(a, 1, b),)


@sample("aten.squeeze.dim", "aten.squeeze_copy.dim", "aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def squeeze(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, 1, b), 1


@sample("aten.squeeze.dims", "aten.squeeze_copy.dims")
def squeeze_dims(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, 1, b, 1), (1, 3)


@sample("aten.view.dtype", "aten.view_copy.dtype")
def view_dtype(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b, grad=False), torch.int64
    yield t(a, b, grad=False), torch.int32


@sample("aten.reshape_as.default", "aten.view_as.default")
def reshape_as(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), t(a * b)


@sample("aten.permute.default", "aten.permute_copy.default")
def permute(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), (2, 0, 1)
    yield t(a, b, c), (-1, 1, 0)


@sample("aten.transpose.int", "aten.transpose_copy.int", "aten.swapaxes.default", "aten.swapdims.default")
def transpose(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), 0, -1


@sample(
    "aten.t.default",
    "aten.numpy_T.default",
    "aten.t_copy.default",
    "aten.mT.default",
    "aten.adjoint.default",
    "aten.mH.default",
)
def turned(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield (t(a, b),)


@sample("aten.movedim.int", "aten.moveaxis.int")
def movedim(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), 0, 2


@sample("aten.movedim.intlist", "aten.moveaxis.intlist")
def movedims(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), (0, 1), (2, 0)


@sample("aten.expand.default", "aten.expand_copy.default", "aten.broadcast_to.default")
def expand(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(b, 1), (a, b, c)
    if a > 1:
        yield t(1, b), (a, b)


@sample("aten.expand_as.default")
def expand_as(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(1, b), t(a, b)


@sample("aten.repeat.default", "aten.tile.default")
def repeat(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, 1), (1, b)
    yield t(a, b), (2, 1, 1)
    yield t(a, b), (2, 1)


@sample("aten.repeat_interleave.self_int")
def repeat_interleave(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), 3, 1
    yield t(a, b), 2


@sample("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b), 1, 1, 9223372036854775807
    yield t(a, b, c), 1, 0, -1
    yield t(a, 4 * b), -1, 1, 9223372036854775807, 2
    yield t(a, b), 0, 0, 9223372036854775807


@sample("aten.narrow.default", "aten.narrow_copy.default")
def narrow(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), 1, 1, b - 2


@sample("aten.select.int", "aten.select_copy.int")
def select(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), 1, -1


@sample(
    "aten.split.Tensor",
    "aten.chunk.default",
    "aten.unsafe_chunk.default",
    "aten.unsafe_split.Tensor",
    "aten.tensor_split.sections",
    "aten.split_copy.Tensor",
)
def split(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, 3 * b, c), 3, 1


@sample("aten.split.sizes", "aten.split_with_sizes.default", "aten.split_with_sizes_copy.default")
def split_sizes(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), (1, b - 1), 1


@sample("aten.tensor_split.indices")
def tensor_split(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), (1, 3), 1


@sample("aten.unbind.int", "aten.unbind_copy.int")
def unbind(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, 3, b), 1


@sample("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), 0, 1, 2


@sample("aten.flip.default")
def flip(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), (1,)


@sample("aten.roll.default")
def roll(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), (2,), (1,)
    yield t(a, b), (2,)


@sample("aten.unfold.default")
def unfold(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, 2 * b), 1, 3, 1
    yield t(a, 4 * b), 1, 4, 4


@sample("aten.view_as_real.default", "aten.view_as_real_copy.default")
def view_as_real(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield (complexes(a, b),)


@sample("aten.view_as_complex_copy.default")
def view_as_complex_copy(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield (t(a, b, 2, grad=False),)


@sample("aten.view_as_complex.default")
def view_as_complex(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield (t(a, b, 2),)


@sample("aten.cat.default", "aten.concat.default", "aten.concatenate.default")
def cat(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield [t(a, b), t(a, c), t(a, b)], 1
    yield [t(a, b), t(c, b)]


@sample("aten.stack.default")
def stack(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield [t(a, b), t(a, b), t(a, b)], -1


@sample("aten.constant_pad_nd.default")
def constant_pad(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), (1, 2)
    yield t(a, b), (0, 1, 2, 0), 3.0
    yield t(a, 3 * b), (-1, 0)


@sample("aten.pad.default")
def pad(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), (1, 2), "constant", 1.5
    yield t(a, b), (1, 2), "reflect"


@sample("aten.reflection_pad1d.default", "aten.replication_pad1d.default")
def mirror_pad1(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), (1, 2)


@sample("aten.reflection_pad2d.default", "aten.replication_pad2d.default")
def mirror_pad2(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c, c), (1, 2, 1, 0)


@sample("aten.reflection_pad3d.default", "aten.replication_pad3d.default")
def mirror_pad3(pick: Pick) -> Iterator[Any]:
    a, b, _ = pick(3)
    yield t(a, b, 4, 4, 4), (1, 2, 1, 0, 1, 1)


@sample("aten.triu.default", "aten.tril.default")
def triangle(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), 1
    yield (t(b, b),)
