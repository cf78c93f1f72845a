"""What every pair of layouts costs on an edge, each distinct (shape, layout pair) priced once and shared between edges.

An edge pays the forward change and its backward dual; a parameter's forward change may happen twice (gathered again for
backward). A parameter's gradient rests as the parameter does, so its node pays for the sum between replicas. Parameters
travel in bundles (:mod:`shardwright.costs.bundles`): each bears a share of what a collective costs besides its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from torch.distributed.tensor import Shard

from shardwright.cluster import Mesh
from shardwright.costs.redistribute import conversion_matrix
from shardwright.costs.replica_sums import replica_axes, share_seconds
from shardwright.graph import Tensor
from shardwright.operators.rules import Layout
from shardwright.search.options import Restriction


class EdgePrices:
    """Prices on one mesh within one restriction; ``overlap`` is the share of parameter traffic taken to be hidden."""

    def __init__(self, mesh: Mesh, within: Restriction, training: bool, overlap: float) -> None:
        self.mesh, self.within, self.training, self.overlap = mesh, within, training, overlap
        self._matrices: dict[object, np.ndarray] = {}
        self._alive: list[object] = []

    def price(
        self,
        tensor: Tensor,
        sources: Sequence,
        needs: Sequence,
        reads: int = 0,
        again: bool = False,
        share: float = 1.0,
    ) -> np.ndarray:
        """Seconds of every change from a source to a need.

        ``reads`` is how often a parameter is read, 0 for what is no parameter; ``again`` says that the reader belongs to a
        recomputed block, so the forward change happens twice; ``share`` which part of a collective's fixed costs it bears.
        """
        grad = tensor.grad and self.training
        # Lists of layouts are shared between repeats, so their identity is enough for most look-ups.
        quick = (tensor.shape, tensor.dtype, grad, reads, again, share, id(sources), id(needs))
        if quick in self._matrices:
            return self._matrices[quick]
        key = (tensor.shape, tensor.dtype, grad, reads, again, share, tuple(sources), tuple(needs))
        if key not in self._matrices:
            distinct, wanted = list(dict.fromkeys(sources)), list(dict.fromkeys(needs))
            total = self._distinct(tensor, grad, distinct, wanted, reads, again, share)
            self._matrices[key] = total[np.ix_(places(sources, distinct), places(needs, wanted))]
        self._alive += [sources, needs]  # an identity is only unique while its object lives
        self._matrices[quick] = self._matrices[key]
        return self._matrices[key]

    def _distinct(
        self, tensor: Tensor, grad: bool, sources: list[Layout], needs: list, reads: int, again: bool, share: float
    ) -> np.ndarray:
        shape, dtype = tensor.shape, tensor.dtype
        there, back = conversion_matrix(shape, dtype, sources, needs, self.mesh, grad=grad)
        if not reads:
            return there * (2 if again else 1) + back
        if share < 1:
            bare = conversion_matrix(shape, dtype, sources, needs, self._bare, grad=grad)
            there, back = (least + share * (whole - least) for least, whole in zip(bare, (there, back), strict=True))
        total = there * (reads if grad else 1) + back
        return np.where(self._forbidden(sources, needs), np.inf, total * (1.0 - self.overlap))

    @cached_property
    def _bare(self) -> Mesh:
        """The same mesh with nothing but bytes to pay for."""
        axes = tuple(axis.without_latency() for axis in self.mesh.axes)
        return replace(self.mesh, axes=axes, device=replace(self.mesh.device, launch_overhead=1e-12))

    def sums(self, layouts: Sequence[Layout], sizes: Sequence[int]) -> np.ndarray:
        """Seconds in which the gradients of a parameter that rests so, in so many bytes, are summed between replicas."""
        axes = (replica_axes(layout, self.mesh.sizes) for layout in layouts)
        seconds = [share_seconds(size, along, self.mesh) for size, along in zip(sizes, axes, strict=True)]
        return np.array(seconds) * (1.0 - self.overlap)

    def _forbidden(self, sources: list[Layout], needs: list) -> np.ndarray:
        """Gathers of parameters over axes on which the restriction allows none."""
        axes = [axis for axis in range(len(self.mesh.sizes)) if not self.within.gather(axis)]
        return np.array(
            [
                [any(isinstance(s[a], Shard) and not isinstance(n[a], Shard) for a in axes) for n in needs]
                for s in sources
            ]
        )


def places(items: Sequence, distinct: list) -> list[int]:
    """Where each item stands in the list of distinct ones.

    >>> places("abca", ["a", "b", "c"])
    [0, 1, 2, 0]
    """
    place = {item: i for i, item in enumerate(distinct)}
    return [place[item] for item in items]
