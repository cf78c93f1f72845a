"""What every pair of layouts costs on an edge, each distinct (shape, layout pair) priced once and shared between edges.

An edge pays the forward change and its backward dual. A parameter's gradient rests as the parameter does, so its node pays
for the sum between replicas. Parameters travel in bundles (:mod:`shardwright.program.bundles`): each bears a share of what a
collective costs besides its bytes. What a bound needs is a price that no execution undercuts: the smallest share there can
be of a bundle, of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.tensor import Shard

from shardwright.cluster import Mesh
from shardwright.costs.redistribute import Weights, conversion_matrix
from shardwright.costs.replica_sums import cheapest_nest, share_seconds
from shardwright.graph import Tensor
from shardwright.operators.rules import Layout, Need
from shardwright.program import Sizes
from shardwright.program.sums import replica_axes
from shardwright.search.options import Restriction


class Ways(NamedTuple):
    """Seconds of changes of layout, [sources, needs]: ``there``, and of their duals in the backward pass, ``back``."""

    there: np.ndarray
    back: np.ndarray


class EdgePrices:
    """Prices on one mesh within one restriction."""

    def __init__(self, mesh: Mesh, within: Restriction, training: bool) -> None:
        self.mesh, self.within, self.training = mesh, within, training
        self._matrices: dict[object, Ways] = {}
        self._alive: list[object] = []
        self._numbers: dict[object, int] = {}  # of layouts, and of their identities: placements are slow to compare
        self._layouts: list[Any] = []

    def price(
        self,
        tensor: Tensor,
        sources: Sequence,
        needs: Sequence,
        share: float | None = None,
        weights: Weights = (),
    ) -> Ways:
        """Seconds of every change from a source to a need, and of its backward dual, counted by ``weights``.

        ``share`` is which part of a collective's fixed costs a parameter bears; nothing for what is no parameter.
        """
        grad = tensor.grad and self.training
        # Lists of layouts are shared between repeats, so their identity is enough for most look-ups.
        quick = (tensor.shape, tensor.dtype, grad, share, weights, id(sources), id(needs))
        if quick in self._matrices:
            return self._matrices[quick]
        given, asked = self._numbered(sources), self._numbered(needs)
        key = (tensor.shape, tensor.dtype, grad, share, weights, tuple(given), tuple(asked))
        if key not in self._matrices:
            distinct, wanted = list(dict.fromkeys(given)), list(dict.fromkeys(asked))
            spread = np.ix_(places(given, distinct), places(asked, wanted))
            known, asked_for = ([self._layouts[n] for n in numbers] for numbers in (distinct, wanted))
            there, back = self._distinct(tensor, grad, known, asked_for, share, weights)
            self._matrices[key] = Ways(there[spread], back[spread])
        self._alive += [sources, needs]  # an identity is only unique while its object lives
        self._matrices[quick] = self._matrices[key]
        return self._matrices[key]

    def _numbered(self, layouts: Sequence) -> list[int]:
        """A number for each layout, the same for equal ones."""
        known = self._numbers
        for layout in {id(one): one for one in layouts if id(one) not in known}.values():
            if layout not in known:
                known[layout] = len(self._layouts)
                self._layouts.append(layout)
            known[id(layout)] = known[layout]
            self._alive.append(layout)
        return [known[id(layout)] for layout in layouts]

    def _distinct(
        self, tensor: Tensor, grad: bool, sources: list[Layout], needs: list, share: float | None, weights: Weights
    ) -> Ways:
        shape, dtype = tensor.shape, tensor.dtype
        there, back = conversion_matrix(shape, dtype, sources, needs, self.mesh, grad, weights)
        if share is None:
            return Ways(there, back)
        if share < 1:
            bare = conversion_matrix(shape, dtype, sources, needs, self._bare, grad, weights)
            there, back = (least + share * (whole - least) for least, whole in zip(bare, (there, back), strict=True))
        axes = [axis for axis in range(len(self.mesh.sizes)) if not self.within.gather(axis)]
        return Ways(np.where(gathers_over(axes, sources, needs), np.inf, there), back)

    @cached_property
    def _bare(self) -> Mesh:
        """The same mesh with nothing but bytes to pay for."""
        axes = tuple(axis.without_latency() for axis in self.mesh.axes)
        return replace(self.mesh, axes=axes, device=replace(self.mesh.device, launch_overhead=1e-12))

    def sums(self, layouts: Sequence[Layout], sizes: Sequence[int]) -> np.ndarray:
        """Seconds in which the gradients of a parameter that rests so, in so many bytes, are summed between replicas."""
        axes = (replica_axes(layout, self.mesh.sizes) for layout in layouts)
        return np.array([share_seconds(size, along, self.mesh) for size, along in zip(sizes, axes, strict=True)])

    def least_sums(
        self,
        layouts: Sequence[Layout],
        sizes: Sequence[int],
        largest: int,
        packed_alone: bool,
        weights: Weights = (),
    ) -> np.ndarray:
        """What these sums take at least, whatever shares their buckets; no parameter has more than ``largest`` bytes.

        A sum's seconds per byte only fall as it grows (every leg is a line, the nest the least of several), and a bucket is
        closed by what fills it, so none is larger than a full one and the largest parameter together.
        """
        most, seconds = Sizes().bucket + largest, []
        mesh = self._bare if any(axis.ratios for axis in self.mesh.axes) else self.mesh
        for layout, size in zip(layouts, sizes, strict=True):
            axes = replica_axes(layout, self.mesh.sizes)
            copied = 2 * size / self.mesh.device.bandwidth
            if packed_alone:
                copied = max(copied, self.mesh.device.launch_overhead)
            copied *= weights[0] if weights else 1.0
            summed = cheapest_nest(most, 1, axes, mesh, weights[1:])[1] * size / most
            seconds.append(copied + summed if axes else 0.0)
        return np.array(seconds)


def gathers_over(axes: Sequence[int], sources: Sequence[Layout], needs: Sequence[tuple[Need, ...]]) -> np.ndarray:
    """Which changes, [sources, needs], gather what is cut along one of these axes."""
    found = np.zeros((len(sources), len(needs)), dtype=bool)
    for axis in axes:
        cut, whole = (np.array([isinstance(one[axis], Shard) for one in side], dtype=bool) for side in (sources, needs))
        found |= cut[:, None] & ~whole[None, :]
    return found


def places(items: Sequence, distinct: list) -> list[int]:
    """Where each item stands in the list of distinct ones.

    >>> places("abca", ["a", "b", "c"])
    [0, 1, 2, 0]
    """
    place = {item: i for i, item in enumerate(distinct)}
    return [place[item] for item in items]
