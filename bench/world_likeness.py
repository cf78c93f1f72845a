"""What a collective takes where nobody measured it, from those that were: other sizes, numbers of devices, kinds, systems.

A size between two measured ones may lie on either side of a change of protocol, and beyond the largest one the last two's
rate says little. But the same library changes its protocol in all kinds and systems at about the same messages, and a
system's links have one rate. So all rows are explained together: by a fixed cost and a rate for every system, factors of
kinds and of numbers of devices for both (``typical``), and what these leave by a Gaussian process over the logarithm of the
message, in which kinds, numbers of devices and systems are more or less alike. How alike is found where the measured rows
are most likely (the marginal likelihood). Only rows of the fitting half come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
TWINS = ("all_gather", "reduce_scatter")
"""Kinds that send the same messages over the same ring."""
FABRICS = (("H100", "H200"),)
"""Devices with the same links and switches."""
BOUND = 9.0
"""Logarithms of likenesses further from 0 than this say no more than this one."""
CALLS = 400
Array = np.ndarray
Simplex = Callable[..., Array]


@dataclass(frozen=True)
class Cases:
    """Collectives, one in every place: system, kind and devices as numbers, the logarithms (of 2) of bytes."""

    systems: Array
    kinds: Array
    devices: Array
    bytes: Array

    @property
    def moved(self) -> Array:
        """Natural logarithms of the bytes that a device sends."""
        count = 2.0 ** (1 + self.devices)
        times = np.where(self.kinds == KINDS.index("all_reduce"), 2.0, 1.0)
        return self.bytes * np.log(2) + np.log(times * (count - 1) / count)


def cases(rows: Sequence[tuple[str, str, int, float]], systems: Sequence[str]) -> Cases:
    """Rows of (system, kind, devices, bytes)."""
    name, kind, devices, amount = zip(*rows, strict=True)
    return Cases(
        np.array([systems.index(one) for one in name]),
        np.array([KINDS.index(one) for one in kind]),
        np.log2(np.array(devices, dtype=float)).astype(int) - 1,
        np.log2(np.array(amount, dtype=float)),
    )


def typical(figures: Array, asked: Cases, systems: int) -> Array:
    """Logarithms of seconds by fixed costs and rates: per system both, then the factors of kinds and of devices."""
    of_kinds, of_devices = systems + 3, systems + 5
    start = figures[:systems][asked.systems]
    start = (
        start
        + np.r_[0.0, figures[systems:of_kinds]][asked.kinds]
        + np.r_[0.0, figures[of_kinds:of_devices]][asked.devices]
    )
    rates = figures[of_devices : of_devices + systems][asked.systems]
    rates = rates + np.r_[0.0, figures[of_devices + systems : of_devices + systems + 3]][asked.kinds]
    sharp = np.exp(figures[-1])
    return np.logaddexp(sharp * start, sharp * (asked.moved - rates)) / sharp


def likeness(figures: Array, a: Cases, b: Cases, systems: Sequence[str]) -> Array:
    """Covariances of what is left: of all systems together, and of every fabric by itself."""
    wide, wide_reach, own, own_reach, _, far, own_far, twins, others, strangers = figures
    octaves = abs(a.bytes[:, None] - b.bytes[None])
    steps = abs(a.devices[:, None] - b.devices[None])
    ring = np.isin([a.kinds, a.kinds], [KINDS.index(kind) for kind in TWINS])[0][:, None]
    ring = ring & np.isin(b.kinds, [KINDS.index(kind) for kind in TWINS])[None]
    kinds = np.where(ring, _share(twins), _share(others))
    kinds = np.where(a.kinds[:, None] == b.kinds[None], 1.0, kinds)
    fabric = np.array(
        [next((i for i, one in enumerate(FABRICS) if name in one), -1 - n) for n, name in enumerate(systems)]
    )
    same = fabric[a.systems][:, None] == fabric[b.systems][None]
    reach = np.sqrt(3) * octaves / np.exp(wide_reach)
    smooth = (
        np.exp(wide)
        * (1 + reach)
        * np.exp(-reach)
        * np.exp(-steps * np.exp(far))
        * np.where(same, 1.0, _share(strangers))
    )
    rough = np.exp(own) * np.exp(-octaves / np.exp(own_reach)) * np.exp(-steps * np.exp(own_far)) * same
    return (smooth + rough) * kinds


START_OF_LIKENESS = np.array([-3.0, 1.1, -3.9, 0.7, -8.5, -0.5, -0.5, 1.0, 0.0, 0.0])


def _share(log_odds: float) -> float:
    return float(1 / (1 + np.exp(-log_odds)))


class Filled:
    """All that follows from measured rows: :meth:`seconds` of any other."""

    def __init__(self, rows: Sequence[tuple[str, str, int, float]], seconds: Array, simplex: Simplex) -> None:
        self.systems = sorted({name for name, *_ in rows})
        self.known, self.count = cases(rows, self.systems), len(self.systems)
        logs = np.log(seconds)

        def off(figures: Array) -> float:
            errors = typical(figures, self.known, self.count) - logs
            return float(np.abs(errors).mean() + (errors**2).mean())

        start = [np.log(1e-5)] * self.count + [0.0] * 3 + [0.2, 0.4] + [np.log(3e11)] * self.count + [0.0] * 3 + [0.3]
        self.typical = np.array(start)
        for _ in range(4):
            self.typical = simplex(off, self.typical, calls=6 * CALLS)
        left = logs - typical(self.typical, self.known, self.count)

        def unlikely(figures: Array) -> float:
            if np.any(np.abs(figures) > BOUND):
                return 1e6
            try:
                root = np.linalg.cholesky(self._covariance(figures))
            except np.linalg.LinAlgError:
                return 1e6
            return float((np.linalg.solve(root, left) ** 2).sum() / 2 + np.log(np.diag(root)).sum())

        self.likeness = START_OF_LIKENESS
        for _ in range(2):
            self.likeness = simplex(unlikely, self.likeness, step=0.4, calls=CALLS)
        inverse = np.linalg.inv(self._covariance(self.likeness))
        self.weights = inverse @ left
        self.without = -self.weights / np.diag(inverse)
        """What is said of every measured row from all others, as the logarithm of said over measured."""

    def _covariance(self, figures: Array) -> Array:
        noise = np.exp(figures[4]) * np.eye(len(self.known.bytes))
        return likeness(figures, self.known, self.known, self.systems) + noise

    def seconds(self, rows: Sequence[tuple[str, str, int, float]]) -> Array:
        """Seconds of any collectives."""
        asked = cases(rows, self.systems)
        left = likeness(self.likeness, asked, self.known, self.systems) @ self.weights
        return np.exp(typical(self.typical, asked, self.count) + left)
