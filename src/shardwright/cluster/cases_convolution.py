"""What calibration runs, third part: convolutions, dense, depthwise and in groups, drawn at random from ranges of sizes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from shardwright.cluster.cases import BYTES, Case, Maker, Run, gradients
from shardwright.operators.families.convolutions import ALIGNED

CONVOLUTION_SEED, CONVOLUTION_SHAPES = 16, 64
FILTERS = ((1, 1),) * 6 + ((3, 3),) * 6 + ((5, 5), (7, 7), (1, 7), (7, 1), (1, 3), (3, 1))
"""How often a filter is drawn is how often it is listed."""


@dataclass(frozen=True)
class Convolution:
    """A convolution's sizes, batch aside; ``groups`` is 1, the number of channels (depthwise) or anything between. An image
    is square, or a line (``rows`` is 1)."""

    channels: int
    image: int
    out: int
    kernel: tuple[int, int]
    stride: int
    groups: int = 1
    rows: int = 0

    @property
    def sides(self) -> tuple[int, int]:
        return (self.rows or self.image, self.image)

    @property
    def family(self) -> str:
        if self.groups > 1:
            return "channelwise" if self.groups == self.channels else "grouped"
        return "pointwise" if self.kernel == (1, 1) and self.stride == 1 else "convolution"


def drawn_convolutions(count: int = CONVOLUTION_SHAPES, seed: int = CONVOLUTION_SEED) -> list[Convolution]:
    """Convolutions drawn at random from ranges of sizes, so that none is there because some model has it.

    Channels from 16 to 2048 and images from 7 to 112 positions, both evenly on a logarithmic scale, smaller images with more
    channels; of eleven one reads an image's three colours, two are depthwise, two pointwise, one is over a line (up to 2^15
    positions, one channel or many). Channels are multiples of 8, 16, 32 or 64: libraries have faster kernels for rounder
    numbers.

    >>> drawn_convolutions(2) == drawn_convolutions(3)[:2]
    True
    """
    draw = random.Random(seed)
    found: list[Convolution] = []
    while len(found) < count:
        kernel, stride = draw.choice(FILTERS), draw.choice((1, 1, 1, 2))
        kind = draw.choice(("first", "line", *("depthwise",) * 2, *("dense",) * 5, *("pointwise",) * 2))
        image, channels, out = (round(2 ** draw.uniform(*ends)) for ends in ((2.8, 6.81), (4, 11), (4, 11)))
        multiple, length = draw.choice((8, 16, 32, 64)), round(2 ** draw.uniform(5, 15))
        inner, outer = (max(1, round(size / multiple)) * multiple for size in (channels, out))
        if kind == "first":
            side = draw.choice((3, 5, 7, 8, 11, 14, 16))
            found.append(
                Convolution(3, draw.randint(128, 320), min(8 * round(out / 8), 1024), (side, side), max(1, side // 2))
            )
        elif kind == "line":
            inner, side = draw.choice((1, inner, inner)), draw.choice((1, 2, 3, 3, 5, 9, 10, 15, 31))
            groups = inner if side > 1 and draw.random() < 0.25 else 1
            if length * max(inner, outer) <= 2**21:
                outer = outer if groups == 1 else inner
                found.append(Convolution(inner, length, outer, (1, side), draw.choice((1, 1, 2, 5)), groups, rows=1))
        elif image * channels <= 2**14 and image * out <= 2**14:
            if kind == "depthwise" and kernel != (1, 1):
                found.append(Convolution(inner, image, inner, kernel, stride, inner))
            elif kind == "dense":
                found.append(Convolution(inner, image, outer, kernel, stride))
            elif kind == "pointwise":
                found.append(Convolution(inner, image, outer, (1, 1), 1))
    return found


def drawn_groups(count: int = 72, seed: int = CONVOLUTION_SEED) -> list[Convolution]:
    """Convolutions in groups of several channels each, over images and over lines, drawn from ranges like the others.

    Libraries compute many of them group after group, on copies in another order of dims.

    >>> all(1 < shape.groups < shape.channels for shape in drawn_groups())
    True
    """
    draw = random.Random(seed)
    found: list[Convolution] = []
    while len(found) < count:
        groups, each, wider = 2 ** draw.randint(1, 6), 2 ** draw.randint(2, 8), draw.choice((1, 2, 2, 4))
        line, exponent = draw.random() < 0.5, draw.uniform(0, 1)
        side = draw.choice((1, 1, 3, 5, 9, 31, 127)) if line else draw.choice((1, 3, 3, 5))
        image = round(2 ** (5 + 6 * exponent) if line else 2 ** (2.8 + 3.5 * exponent))
        channels, out = groups * each, groups * each * wider // 2
        if max(channels, out) <= 2048 and image * channels <= 2**20 >> (0 if line else 5):
            kernel, rows = ((1, side), 1) if line else ((side, side), 0)
            found.append(Convolution(channels, image, out, kernel, draw.choice((1, 1, 2)), groups, rows))
    return found


Features = tuple[tuple[str, float], ...]


def _product(shape: Convolution, batch: int, positions: int) -> Features:
    k = shape.channels // shape.groups * math.prod(shape.kernel)
    return ("m", float(batch * positions)), ("n", float(shape.out)), ("k", float(k))


def _area(shape: Convolution) -> Features:
    return (("area", float(math.prod(shape.kernel))),)


FEATURES: dict[str, Callable[[Convolution, int, int], Features]] = {
    "convolution": lambda shape, batch, positions: (*_product(shape, batch, positions), *_area(shape)),
    # A product of matrices whose rows are the positions of an image: how those are aligned decides which kernels there are.
    "pointwise": lambda shape, batch, positions: (
        *_product(shape, batch, positions),
        ("alignment", float(math.gcd(positions, ALIGNED))),
    ),
    "channelwise": lambda shape, batch, positions: (
        ("images", float(batch * shape.channels)),
        ("positions", float(positions)),
        *_area(shape),
        ("stride", math.prod(shape.sides) / positions),
    ),
    "grouped": lambda shape, batch, positions: (
        *_product(shape, batch, positions),
        *_area(shape),
        ("groups", float(shape.groups)),
    ),
}
"""Of each family, what its kernels' efficiency depends on, as :mod:`shardwright.operators.families.convolutions` has it."""


def varied(shapes: Sequence[Convolution], batches: Sequence[int]) -> Iterator[tuple[int, Convolution]]:
    """Each shape with one batch, all batches in turn: of so many cases, few that are alike."""
    return ((batches[number % len(batches)], shape) for number, shape in enumerate(shapes))


def convolutions(
    make: Maker,
    dtype: str,
    most_flops: float,
    batches: tuple[int, ...],
    once: bool = False,
    shapes: Sequence[Convolution] = (),
    spread: bool = False,
) -> Iterator[Case]:
    """Convolutions in the plain (channels first) memory format, forward, by input and by weight.

    ``once``: each with the first of the batches that is not too much work (a CPU takes images one after the other);
    ``spread``: each with one of the batches, in turn.
    """
    seen: set[Convolution] = set()
    shapes = shapes or drawn_convolutions()
    for batch, shape in varied(shapes, batches) if spread else itertools.product(batches, shapes):
        pad = (shape.kernel[0] // 2, shape.kernel[1] // 2)
        side = [
            (extent + 2 * p - size) // shape.stride + 1
            for extent, p, size in zip(shape.sides, pad, shape.kernel, strict=True)
        ]
        area = shape.kernel[0] * shape.kernel[1]
        m, k = batch * side[0] * side[1], shape.channels // shape.groups * area
        flops = 2.0 * m * shape.out * k
        moved = (batch * shape.channels * math.prod(shape.sides) + k * shape.out + m * shape.out) * BYTES[dtype]
        if flops > most_flops or moved > 4e9 or (once and shape in seen):
            continue
        seen.add(shape)
        family = shape.family
        features = FEATURES[family](shape, batch, math.prod(side))
        sizes = (batch, shape, pad)

        def forward(sizes: tuple = sizes) -> Run:
            batch, shape, pad = sizes
            x = make(batch, shape.channels, *shape.sides, dtype=dtype)
            w = make(shape.out, shape.channels // shape.groups, *shape.kernel, dtype=dtype)
            return lambda: F.conv2d(x, w, stride=shape.stride, padding=pad, groups=shape.groups)

        def backward(which: int, sizes: tuple = sizes) -> tuple[torch.Tensor, list[torch.Tensor]]:
            batch, shape, pad = sizes
            x = make(batch, shape.channels, *shape.sides, dtype=dtype, grad=which == 0)
            w = make(shape.out, shape.channels // shape.groups, *shape.kernel, dtype=dtype, grad=which == 1)
            return F.conv2d(x, w, stride=shape.stride, padding=pad, groups=shape.groups), [(x, w)[which]]

        yield Case(family, "forward", dtype, features, flops, moved, forward)
        for which, step in enumerate(("input", "weight")):
            build = gradients(lambda which=which, sizes=sizes: backward(which, sizes))  # type: ignore[misc]  # bound early
            yield Case(family, step, dtype, features, flops, moved, build)
