"""What collectives and matrix products take on a device, fitted to tables that somebody measured.

Collectives are interpolated in bytes (a fixed cost and a rate from one size to the next) and, between the numbers of
devices that were measured, in their logarithm. Sizes that a table lacks are filled in from all kinds, numbers of devices
and systems together, which share where protocols change. Beyond the largest message the last two's rate goes on, below the
smallest the seconds hold. A product is cut into tiles that a device's multiprocessors work on side by side, in waves; of
all tiles and cuts of the sum the fastest counts, as a library's heuristic would have it (wave quantisation, in NVIDIA's
*Matrix Multiplication Background User's Guide*). The constants are one device's, in ``primitives/DEVICE.toml``, with the
rows they were fitted to and what they left of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.cluster.serial import read_toml
from shardwright.errors import ClusterError

_FOLDER = resources.files("shardwright.cluster") / "primitives"
LARGE_TILES = ((256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (256, 64), (64, 256))
SMALL_TILES = ((128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32))
TILES = np.array((*LARGE_TILES, *SMALL_TILES))
"""Rows and columns of the tiles that a library has kernels for."""
CUTS = np.array([1, 2, 3, 4, 6, 8, 16])
"""Into how many pieces it cuts the sum where tiles are too few."""
DEPTH = 64
"""Of the sum, what a tile takes at a time."""
SHARPNESS = 4
"""How sharply the slowest of arithmetic, memory and cache decides: between their sum (1) and the largest alone."""


@dataclass(frozen=True)
class Products:
    """A device's products: ``start`` seconds of every kernel and ``prologue`` seconds of every half-sized tile (others: by
    its side) and ``epilogue`` (others: by their area, which is what they write); the pace of large and of half-sized tiles
    over a multiprocessor's peak, smaller ones by the power ``fall`` of their area; ``memory`` and ``cache`` over the
    datasheet's bandwidth, and ``resident`` over the memory's what lies in the second-level cache of ``cached`` bytes since
    the same product was made a moment before; ``spill``: how often the pieces of a cut sum are moved; ``rounding``: 1 where
    the last wave takes as long as a full one, 0 where only what it holds.
    """

    peak: float
    bandwidth: float
    multiprocessors: int
    cached: float
    start: float
    large: float
    half: float
    fall: float
    prologue: float
    epilogue: float
    memory: float
    resident: float
    spill: float
    cache: float
    rounding: float
    source: str = ""

    def seconds(self, sizes: np.ndarray) -> np.ndarray:
        """Seconds of products of [m, n, k, batch] (one row each) in 2-byte numbers.

        >>> table = Products(312e12, 2e12, 108, 4e7, 2e-6, 0.9, 0.8, 0.1, 1e-6, 0.0, 0.8, 1.0, 2.0, 4.0, 1.0)
        >>> [round(float(s) * 1e6) for s in table.seconds(np.array([[64, 64, 64, 1], [8192, 8192, 8192, 1]]))]
        [2, 3979]
        """
        m, n, k, batch = np.asarray(sizes, dtype=float).T[:, :, None, None]
        rows, columns = TILES.T[:, None, :, None]
        cuts = CUTS[None, None, :]
        area, depth = rows * columns, np.ceil(k / cuts / DEPTH) * DEPTH
        half = self.half * np.minimum(area / 16384, 1.0) ** self.fall
        pace = np.where(area >= 32768, self.large, half)
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * cuts * batch
        waves = tiles / self.multiprocessors
        waves = self.rounding * np.ceil(waves) + (1 - self.rounding) * np.maximum(waves, 1.0)
        prologue = self.prologue * np.sqrt(area / 16384) + self.epilogue * area / 16384
        arithmetic = waves * (2 * area * depth / (self.peak / self.multiprocessors * pace) + prologue)
        operands = 2 * (m * k + n * k + m * n) * batch
        moved = operands + np.where(cuts > 1, 4 * m * n * batch * cuts * self.spill, 0.0)
        here = 1 / (1 + (operands / self.cached) ** SHARPNESS)
        moved = moved * (1 - here + here / self.resident)
        read = tiles * (rows + columns) * depth * 2
        parts = (arithmetic, moved / (self.bandwidth * self.memory), read / (self.bandwidth * self.cache))
        whole = sum(part**SHARPNESS for part in parts) ** (1 / SHARPNESS)
        seconds = self.start + whole + np.where(cuts > 1, self.prologue, 0.0)
        return seconds.reshape(len(sizes), -1).min(axis=1)


@dataclass(frozen=True)
class Primitives:
    """A device's collectives as {(kind, devices): rows of (bytes, seconds)}, and its products where they were measured."""

    device: str
    collectives: Mapping[tuple[str, int], np.ndarray] = field(default_factory=dict)
    products: Products | None = None
    source: str = ""

    def collective(self, kind: str, devices: int, amount: float) -> float:
        """Seconds of one collective of ``amount`` bytes (the larger side) over devices of a node."""
        if devices < 2 or amount <= 0:
            return 0.0
        known = sorted(size for name, size in self.collectives if name == kind)
        if not known:
            raise ClusterError(
                f"{self.device}: nobody measured {kind}.", "Choose a device with a table of collectives."
            )
        below = max((size for size in known if size <= devices), default=known[0])
        above = min((size for size in known if size >= devices), default=known[-1])
        low, high = (_interpolated(self.collectives[kind, size], amount) for size in (below, above))
        if below == above:
            return low
        share = math.log(devices / below) / math.log(above / below)
        return low ** (1 - share) * high**share


def _interpolated(rows: np.ndarray, amount: float) -> float:
    sizes, seconds = rows.T
    rate = max(seconds[-1] - seconds[-2], 0.0) / (sizes[-1] - sizes[-2])
    return float(np.interp(amount, sizes, seconds) + rate * max(amount - sizes[-1], 0.0))


@cache
def primitives(device: str) -> Primitives | None:
    """The tables of a preset device, none where nobody published any.

    >>> primitives("A100-80GB").collective("all_reduce", 8, 2**28) > primitives("H100").collective("all_reduce", 8, 2**28)
    True
    """
    path = Path(str(_FOLDER / f"{device.lower()}.toml"))
    if not path.exists():
        return None
    data: dict[str, Any] = read_toml(path)
    rows = {
        (kind, int(size)): np.array(sorted(table + data["filled"][kind][size]))
        for kind, by in data["collectives"].items()
        for size, table in by.items()
    }
    products = Products(**data["products"]) if "products" in data else None
    return Primitives(device, rows, products, data["source"])
