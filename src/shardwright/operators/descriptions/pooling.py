"""Pooling: windows without weights. Adaptive pooling is a window where the sizes divide, else positions stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.operators.descriptions.convolutions import spread
from shardwright.operators.language import Expression, Max, Opaque, Sum, TensorArgument
from shardwright.operators.registry import describes


def _windows(reducer: Any, x: TensorArgument, kernel: Any, stride: Any, padding: Any, dilation: Any, count: int) -> Any:
    sizes = spread(kernel, count)
    strides = spread(stride, count) if stride not in (None, ()) else sizes
    pads, dilations = spread(padding, count), spread(dilation, count)

    def element(*i: Any) -> Expression:
        lead, position = i[: len(i) - count], i[len(i) - count :]

        def read(*r: Any) -> Expression:
            where = [p * s + t * d - b for p, s, t, d, b in zip(position, strides, r, dilations, pads, strict=True)]
            return x.padded((*lead, *where))

        return reducer(lambda *r: read(*r), sizes)

    return element


def _max(count: int) -> Any:
    def pool(x: TensorArgument, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Any:
        return _windows(Max, x, kernel, stride, padding, dilation, count)

    return pool


def _average(count: int) -> Any:
    def pool(x: TensorArgument, kernel: Any, stride: Any, padding: Any) -> Any:
        def mean(body: Any, extents: Sequence[int]) -> Expression:
            return Sum(body, extents) * 0.5

        return _windows(mean, x, kernel, stride, padding, 1, count)

    return pool


for _n in (1, 2, 3):
    describes(f"aten.max_pool{_n}d.default", kind="reduction")(_max(_n))
    describes(f"aten.avg_pool{_n}d.default", kind="reduction")(_average(_n))


def _max_with_indices(count: int) -> Any:
    def pool(x: TensorArgument, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Any:
        """The indices are positions in the whole plane: positions are not cut."""
        lead = x.rank - count
        plane = lambda *i: Opaque(x[(*i[:lead], *(slice(None),) * count)])
        return plane, plane

    return pool


for _n in (1, 2, 3):
    describes(f"aten.max_pool{_n}d_with_indices.default", kind="reduction")(_max_with_indices(_n))


def _adaptive(count: int, reducer: Any) -> Any:
    def pool(x: TensorArgument, output_size: Any) -> Any:
        lead = x.rank - count
        sizes = spread(output_size, count)
        sources = x.shape[lead:]
        divides = [n is not None and s % n == 0 for s, n in zip(sources, sizes, strict=True)]
        factors = [s // n if ok else 0 for s, n, ok in zip(sources, sizes, divides, strict=True)]

        def element(*i: Any) -> Expression:
            inner = [f for f in factors if f]

            def read(*r: Any) -> Expression:
                rest = iter(r)
                where = [p * f + next(rest) if f else slice(None) for p, f in zip(i[lead:], factors, strict=True)]
                return x[(*i[:lead], *where)]

            return reducer(lambda *r: read(*r), inner) if inner else Opaque(read())

        return element

    return pool


def _mean(body: Any, extents: Sequence[int]) -> Expression:
    return Sum(body, extents) * 0.5


for _n in (1, 2, 3):
    describes(f"aten.adaptive_avg_pool{_n}d.default", kind="reduction")(_adaptive(_n, _mean))
for _n in (2, 3):
    describes(f"aten._adaptive_avg_pool{_n}d.default", kind="reduction")(_adaptive(_n, _mean))


def _adaptive_max(count: int) -> Any:
    def pool(x: TensorArgument, output_size: Any) -> Any:
        lead = x.rank - count
        plane = lambda *i: Opaque(x[(*i[:lead], *(slice(None),) * count)])
        return plane, plane

    return pool


for _n in (1, 2, 3):
    describes(f"aten.adaptive_max_pool{_n}d.default", kind="reduction")(_adaptive_max(_n))
