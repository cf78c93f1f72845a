"""Concatenation, stacking and padding.

Constant padding of a cut dim: the window is clipped at the tensor's border, the piece pads what is missing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.operators.language import Expression, TensorArgument, put, where
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes, known
from shardwright.operators.samples import reals


@describes("aten.cat.default", "aten.concat.default", "aten.concatenate.default", kind="copy")
def cat(tensors: tuple[TensorArgument, ...], dim: int, *, out: Any) -> Any:
    """The inputs lie one behind the other in ``dim``; concatenation is linear in all of them together."""
    used = [t for t in tensors if t.shape != (0,) or len(out[0]) == 1]
    return lambda *i: _sum([t[put(i, dim % len(i), slice(None))] for t in used])


def _sum(terms: Sequence[Expression]) -> Expression:
    """Halved again and again: a recurrent model joins five hundred steps, and expressions are followed by recursion."""
    if len(terms) == 1:
        return terms[0]
    middle = (len(terms) + 1) // 2
    return _sum(terms[:middle]) + _sum(terms[middle:])


@describes("aten.stack.default", kind="copy")
def stack(tensors: tuple[TensorArgument, ...], dim: int) -> Any:
    def element(*i: Any) -> Expression:
        at = dim % len(i)
        return _sum([t[(*i[:at], *i[at + 1 :])] for t in tensors])

    return element


@describes("aten.constant_pad_nd.default", "aten.pad.default", kind="copy")
def pad(x: TensorArgument, pads: Sequence[int], *, mode: Any, value: Any) -> Any:
    """Pads are given from the last dim backwards; padded dims are windows that reach over the border."""
    before = [0] * x.rank
    touched = set()
    for n in range(len(pads) // 2):
        dim = x.rank - 1 - n
        before[dim] = pads[2 * n]
        if pads[2 * n] or pads[2 * n + 1]:
            touched.add(dim)
    if mode not in (None, "constant"):
        return lambda *i: x[tuple(slice(None) if d in touched else entry for d, entry in enumerate(i))]

    def element(*i: Any) -> Expression:
        inside = x.padded([entry - before[d] if d in touched else entry for d, entry in enumerate(i)])
        return inside * 1 if not value else where(1, inside, value)

    return element


@describes(
    "aten.reflection_pad1d.default",
    "aten.reflection_pad2d.default",
    "aten.reflection_pad3d.default",
    "aten.replication_pad1d.default",
    "aten.replication_pad2d.default",
    "aten.replication_pad3d.default",
    kind="copy",
)
def mirror_pad(x: TensorArgument, pads: Sequence[int]) -> Any:
    touched = set(range(x.rank - len(pads) // 2, x.rank))
    return lambda *i: x[tuple(slice(None) if d in touched else entry for d, entry in enumerate(i))]


@computes("aten.constant_pad_nd.default", "aten.pad.default")
def pad_piece(call: Call) -> Piece | None:
    missing = call.missing(0)
    if not missing:
        return None
    rank = len(call.output.shape)
    pads = list(call.argument("pad"))
    for dim, (before, after) in missing.items():
        place = 2 * (rank - 1 - dim)
        if place < len(pads):
            pads[place : place + 2] = [before, after]
    return call.rewritten(pad=tuple(pads))


def padded(x: Any, missing: dict[int, tuple[int, int]], fill: float) -> Any:
    """``x`` with constant borders; ``missing`` holds (before, after) per dim."""
    import torch

    if not any(before or after for before, after in missing.values()):
        return x
    pads: list[int] = []
    for dim in range(x.dim() - 1, min(missing) - 1, -1):
        pads += missing.get(dim, (0, 0))
    return torch.ops.aten.constant_pad_nd(x, pads, fill)


known("aten.constant_pad_nd", fill=2)
known("aten.pad", fill=3)


known("aten.stack", measured="cat")


known(
    "aten.cat.default",
    "aten.concat.default",
    "aten.concatenate.default",
    samples=lambda a, b, c: [([reals(a, b), reals(a, c), reals(a, b)], 1), ([reals(a, b), reals(c, b)],)],
)
known("aten.stack.default", samples=lambda a, b: [([reals(a, b), reals(a, b), reals(a, b)], -1)])
known(
    "aten.constant_pad_nd.default",
    samples=lambda a, b: [(reals(a, b), (1, 2)), (reals(a, b), (0, 1, 2, 0), 3.0), (reals(a, 3 * b), (-1, 0))],
)
known(
    "aten.pad.default", samples=lambda a, b: [(reals(a, b), (1, 2), "constant", 1.5), (reals(a, b), (1, 2), "reflect")]
)
known(
    "aten.reflection_pad1d.default",
    "aten.replication_pad1d.default",
    samples=lambda a, b, c: [(reals(a, b, c), (1, 2))],
)
known(
    "aten.reflection_pad2d.default",
    "aten.replication_pad2d.default",
    samples=lambda a, b, c: [(reals(a, b, c, c), (1, 2, 1, 0))],
)
known(
    "aten.reflection_pad3d.default",
    "aten.replication_pad3d.default",
    samples=lambda a, b, _: [(reals(a, b, 4, 4, 4), (1, 2, 1, 0, 1, 1))],
)


known("aten.cat", "aten.stack", any_strides=True)
