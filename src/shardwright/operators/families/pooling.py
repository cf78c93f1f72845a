"""Pooling: windows without weights. Adaptive pooling is a window where the sizes divide, else positions stay whole.

Pooling in pieces: halos arrive with the window, borders are padded here, averages know what lies outside the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardwright.operators.families.convolutions import spread
from shardwright.operators.families.joining import padded
from shardwright.operators.language import Expression, Max, Opaque, Sum, TensorArgument
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes, known
from shardwright.operators.samples import reals


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


def _setting(call: Call, name: str, count: int, default: Any) -> list[int]:
    found = call.argument(name, ())
    return spread(found, count) if found not in ((), None) else list(default)


def _positions(call: Call, count: int) -> dict[int, Any]:
    lead = len(call.output.shape) - count
    return {dim: span for dim, span in call.output_spans().items() if dim >= lead}


def _borders(
    call: Call, count: int, kernel: list[int], stride: list[int], pads: list[int], dilation: list[int]
) -> dict[int, tuple[int, int]]:
    """What to pad per position dim so that an unpadded pooling gives exactly the local outputs."""
    lead = len(call.output.shape) - count
    spans, local = call.output_spans(), call.local_shape()
    x = call.tensors[call.op.inputs[0]].shape
    held = call.input_spans(0)
    borders = {}
    for n in range(count):
        dim = lead + n
        start = spans[dim].start if dim in spans else 0
        first = start * stride[n] - pads[n]
        last = (start + local[dim] - 1) * stride[n] - pads[n] + dilation[n] * (kernel[n] - 1) + 1
        have = (held[dim].start, held[dim].stop) if dim in held else (0, x[dim])
        borders[dim] = (have[0] - first, last - have[1])
    return borders


def _make(count: int, largest: bool) -> Any:
    def pool(call: Call) -> Piece | None:
        import torch

        if shares := _summed(call, count):
            return _scaled(call, count, shares)
        if not _positions(call, count):
            return None
        kernel = spread(call.argument("kernel_size"), count)
        stride = _setting(call, "stride", count, kernel)
        pads = _setting(call, "padding", count, [0] * count)
        dilation = _setting(call, "dilation", count, [1] * count)
        borders = _borders(call, count, kernel, stride, pads, dilation)
        name = "max_pool" if largest else "avg_pool"
        function = getattr(torch.ops.aten, f"{name}{count}d")
        if largest:

            def kernel_max(exchange: Any, **arguments: Any) -> torch.Tensor:
                x = _crop(arguments["self"], borders)
                return function(padded(x, _positive(borders), float("-inf")), kernel, stride, [0] * count, dilation)

            return call.kernel(kernel_max)
        divisors = _divisors(call, count, kernel, stride, pads)

        def kernel_average(exchange: Any, **arguments: Any) -> torch.Tensor:
            x = padded(_crop(arguments["self"], borders), _positive(borders), 0.0)
            means = function(x, kernel, stride, [0] * count) * _volume(kernel)
            for place, counts in enumerate(divisors):
                shape = [-1 if d == place else 1 for d in range(count)]
                means = means / torch.tensor(counts, dtype=means.dtype, device=means.device).view(shape)
            return means

        return call.kernel(kernel_average)

    return pool


def _summed(call: Call, count: int) -> dict[int, float]:
    """Position dims that one window covers and that are cut: the local share of each."""
    lead = len(call.output.shape) - count
    spans = call.input_spans(0)
    return {d: s.size / s.extent for d, s in spans.items() if d >= lead and d not in call.output_spans()}


def _scaled(call: Call, count: int, shares: dict[int, float]) -> Piece:
    """The mean over a cut window: local means, each counted by its share of the window."""
    from shardwright._torch_compat import operator

    function = operator(call.op.target)
    lead, local = len(call.output.shape) - count, call.local_shape()
    rest = [d for d in range(lead, lead + count) if d not in shares]

    def kernel(exchange: Any, **arguments: Any) -> Any:
        x = arguments["self"].mean(sorted(shares), keepdim=True) * math.prod(shares.values())
        if not rest:
            return x
        if "output_size" in arguments:
            return function(x, list(local[-count:]))
        sizes = spread(arguments["kernel_size"], count)
        return function(
            **(arguments | {"self": x, "kernel_size": [1 if lead + n in shares else k for n, k in enumerate(sizes)]})
        )

    return call.kernel(kernel)


def _positive(borders: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    return {dim: (max(before, 0), max(after, 0)) for dim, (before, after) in borders.items()}


def _crop(x: Any, borders: dict[int, tuple[int, int]]) -> Any:
    """Rows that no window reaches (a remainder at the end) are left out."""
    for dim, (before, after) in borders.items():
        first, extra = max(-before, 0), max(-after, 0)
        if first or extra:
            x = x.narrow(dim, first, x.shape[dim] - first - extra)
    return x


def _volume(kernel: list[int]) -> int:
    product = 1
    for size in kernel:
        product *= size
    return product


def _divisors(call: Call, count: int, kernel: list[int], stride: list[int], pads: list[int]) -> list[list[float]]:
    """Per position dim and local output, how many elements its window counts (their product is the divisor)."""
    x = call.tensors[call.op.inputs[0]].shape
    lead = len(call.output.shape) - count
    spans, local = call.output_spans(), call.local_shape()
    override = call.argument("divisor_override")
    include = call.argument("count_include_pad", True)
    result: list[list[float]] = []
    for n in range(count):
        dim = lead + n
        start = spans[dim].start if dim in spans else 0
        counts: list[float] = []
        for y in range(start, start + local[dim]):
            first = y * stride[n] - pads[n]
            last = min(first + kernel[n], x[dim] + pads[n])
            inside = min(last, x[dim]) - max(first, 0)
            counts.append(float(last - first if include else inside))
        result.append(counts)
    if override:
        return [[float(override)] * local[lead], *([1.0] * local[lead + n] for n in range(1, count))]
    return result


for _n in (1, 2, 3):
    computes(f"aten.max_pool{_n}d.default")(_make(_n, largest=True))
    computes(f"aten.avg_pool{_n}d.default")(_make(_n, largest=False))


def _adaptive_piece(count: int) -> Any:
    def pool(call: Call) -> Piece | None:
        """The output size is local; dims that are not cut keep theirs."""
        if shares := _summed(call, count):
            return _scaled(call, count, shares)
        if not _positions(call, count):
            return None
        return call.rewritten(output_size=call.local_shape()[-count:])

    return pool


for _n in (1, 2, 3):
    computes(f"aten.adaptive_avg_pool{_n}d.default")(_adaptive_piece(_n))
for _n in (2, 3):
    computes(f"aten._adaptive_avg_pool{_n}d.default")(_adaptive_piece(_n))


known(
    "aten.max_pool2d.default",
    samples=lambda n, c, h: [
        (reals(n, c, 2 * h, 2 * h), (2, 2)),
        (reals(2, c, 4 * h, 4 * h), (3, 3), (2, 2), (1, 1)),
        (reals(2, c, 4 * h, 4 * h), (3, 3), (2, 2), (0, 0), (1, 1), True),
    ],
)
known("aten.max_pool1d.default", samples=lambda n, c, h: [(reals(n, c, 3 * h), (3,), (2,), (1,))])
known("aten.max_pool3d.default", samples=lambda _n, c, _: [(reals(2, c, 8, 8, 8), (3, 3, 3), (1, 1, 1), (1, 1, 1))])
known(
    "aten.avg_pool2d.default",
    samples=lambda n, c, h: [
        (reals(n, c, 2 * h, 2 * h), (2, 2)),
        (reals(2, c, 4 * h, 4 * h), (3, 3), (1, 1), (1, 1)),
        (reals(2, c, 4 * h, 4 * h), (3, 3), (2, 2), (1, 1), False, False),
        (reals(2, c, 4 * h, 4 * h), (3, 3), (2, 2), (1, 1), True, True),
        (reals(2, c, h, h), (h, h)),
        (reals(2, c, 4 * h, 4 * h), (3, 3), (1, 1), (1, 1), False, True, 5),
    ],
)
known("aten.avg_pool1d.default", samples=lambda n, c, h: [(reals(n, c, 3 * h), (3,), (1,), (1,))])
known("aten.avg_pool3d.default", samples=lambda _n, c, _: [(reals(2, c, 8, 8, 8), (3, 3, 3), (1, 1, 1), (1, 1, 1))])
known("aten.max_pool2d_with_indices.default", samples=lambda n, c, h: [(reals(n, c, 2 * h, 2 * h), (2, 2))])
known("aten.max_pool3d_with_indices.default", samples=lambda n, c, _: [(reals(n, c, 4, 4, 4), (2, 2, 2))])
known(
    "aten.adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool2d.default",
    samples=lambda n, c, h: [
        (reals(n, c, h, h), (1, 1)),
        (reals(n, c, 2 * h, 3 * h), (h, h)),
        (reals(n, c, 13, 13), (6, 6)),
    ],
)
known("aten.adaptive_avg_pool1d.default", samples=lambda n, c, h: [(reals(n, c, 2 * h), (h,)), (reals(n, c, h), (1,))])
known(
    "aten.adaptive_avg_pool3d.default",
    "aten._adaptive_avg_pool3d.default",
    samples=lambda n, c, _: [(reals(n, c, 4, 4, 4), (1, 1, 2))],
)
known("aten.adaptive_max_pool1d.default", samples=lambda n, c, h: [(reals(n, c, 2 * h), (h,))])
known("aten.adaptive_max_pool2d.default", samples=lambda n, c, h: [(reals(n, c, 2 * h, h), (h, 1))])
known("aten.adaptive_max_pool3d.default", samples=lambda n, c, _: [(reals(n, c, 4, 4, 4), (2, 2, 2))])


known("aten.max_pool2d", "aten.max_pool2d_with_indices", decides="windows")
