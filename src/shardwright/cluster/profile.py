"""What calibration learned about a device: efficiency curves per kind of kernel, dispatch times, optimizer steps.

A curve holds measured points: features of a shape (such as m, n and k of a matrix product) and the ratio of measured
seconds to the ideal seconds of the datasheet's roofline. Ratios rather than seconds are stored, so that an interpolated
price still scales exactly with the work. Where bytes are all that matters, seconds follow a straight line from one point
to the next, a fixed cost and a rate; beyond the largest, the rate goes on, not the fixed cost. What is fixed only small
sizes tell: from large ones it would be a difference of errors, so below them all of their time shrinks with the bytes.
Where a shape has several features, the ratio is to the ideal seconds and what is fixed together (else it would grow without
end towards small shapes, and between two of them so would the error), and its logarithm follows a straight line fitted to
the nearest points in log-feature space (local regression, Cleveland 1979), never beyond what they span; outside, the
efficiency at the border holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

SMALL = 2**20
"""Bytes below which what a kernel costs whatever it moves is a visible part of its time."""
NEIGHBOURS = 8
NEARNESS = 0.01
RIDGE = 0.05
"""Chosen by leaving single points out: median error 4 % for products, 6 % batched, 9 % attention; of convolutions all points
of a shape: 16 to 31 %."""


@dataclass(frozen=True)
class Curve:
    """Measured ``ratios`` (seconds over ideal and ``fixed`` seconds) at ``points`` (one row of features each).

    Example
    -------
    >>> curve = Curve(("bytes",), ((1e3,), (1e6,)), (100.0, 1.0))
    >>> [round(float(r), 1) for r in curve(np.array([[1e2], [1e3], [5.005e5], [1e9]]))]
    [991.9, 100.0, 1.1, 1.0]
    """

    features: tuple[str, ...]
    points: tuple[tuple[float, ...], ...]
    ratios: tuple[float, ...]
    fixed: float = 0.0

    def seconds(self, features: np.ndarray, ideal: np.ndarray) -> np.ndarray:
        """Real seconds of kernels with these ideal ones."""
        return self(features[:, : len(self.features)]) * (ideal + self.fixed)

    @cached_property
    def _logs(self) -> tuple[np.ndarray, np.ndarray]:
        return np.log2(np.array(self.points, dtype=float)), np.log2(np.array(self.ratios, dtype=float))

    @cached_property
    def _line(self) -> tuple[np.ndarray, np.ndarray]:
        """Sizes in order and, in units of a size's ideal seconds per byte, the seconds measured there (their mean)."""
        sizes, which = np.unique(np.array(self.points, dtype=float)[:, 0], return_inverse=True)
        ratios = np.bincount(which, weights=np.array(self.ratios)) / np.bincount(which)
        return sizes, sizes * ratios

    def _by_bytes(self, asked: np.ndarray) -> np.ndarray:
        sizes, seconds = self._line
        rates = np.diff(seconds) / np.diff(sizes) if len(sizes) > 1 else seconds / sizes
        border = seconds[-1] / sizes[-1]  # with the fixed cost in it: beyond, no kernel is slower than that
        last = np.clip(rates[-1], min(1.0, border), border)
        whole = seconds[0] / sizes[0]
        first = np.clip(rates[0], 0.0, whole) if sizes[0] < SMALL else whole
        above, below = np.maximum(asked - sizes[-1], 0.0), np.maximum(sizes[0] - asked, 0.0)
        return (np.interp(asked, sizes, seconds) + last * above - first * below) / asked

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Ratio of real to ideal (and fixed) seconds for each row of features."""
        points, ratios = self._logs
        asked = np.maximum(np.asarray(features, dtype=float), 1e-12)
        if points.shape[1] == 1:
            return self._by_bytes(asked[:, 0])
        asked = np.log2(asked)
        asked = np.clip(asked, points.min(axis=0), points.max(axis=0))
        squares = ((asked[:, None, :] - points[None, :, :]) ** 2).sum(axis=2)
        count = min(NEIGHBOURS, len(points))
        near = np.argpartition(squares, count - 1, axis=1)[:, :count]
        weights = 1.0 / (np.take_along_axis(squares, near, axis=1) + NEARNESS)
        weights /= weights.max(axis=1, keepdims=True)
        # A weighted straight line through the nearest points: its value at the point asked for is its first coefficient.
        offsets = points[near] - asked[:, None, :]
        design = np.concatenate([np.ones((*near.shape, 1)), offsets], axis=2)
        weighted = design * weights[:, :, None]
        normal = weighted.transpose(0, 2, 1) @ design
        normal[:, range(1, normal.shape[1]), range(1, normal.shape[1])] += RIDGE
        right = weighted.transpose(0, 2, 1) @ ratios[near][:, :, None]
        value = np.linalg.solve(normal, right)[:, 0, 0]
        return np.exp2(np.clip(value, ratios[near].min(axis=1), ratios[near].max(axis=1)))

    def __hash__(self) -> int:
        return hash((self.features, len(self.points), self.ratios[:4]))


@dataclass(frozen=True)
class Profile:
    """All curves of one device, and where and when they were measured.

    ``curves`` are named ``kernel/dtype/pass`` (``matmul/bfloat16/forward``). ``dispatch`` gives the host's seconds per
    operator as triples (operator, forward, backward). ``optimizer`` rows are (name/dtype, host
    seconds per step, host seconds per tensor, device seconds per parameter byte). ``kernel_floor`` is the shortest time
    any kernel takes. ``label`` is shown wherever a price is. ``preset`` names the shipped device a profile came with: files
    refer to it instead of repeating its curves.
    """

    label: str
    curves: tuple[tuple[str, Curve], ...] = ()
    dispatch: tuple[tuple[str, float, float], ...] = ()
    optimizer: tuple[tuple[str, float, float, float], ...] = ()
    kernel_floor: float = 0.0
    preset: str = ""

    @cached_property
    def by_name(self) -> dict[str, Curve]:
        return dict(self.curves)

    @cached_property
    def dispatch_of(self) -> dict[str, tuple[float, float]]:
        return {name: (forward, backward) for name, forward, backward in self.dispatch}

    def __hash__(self) -> int:
        return hash((self.label, len(self.curves)))
