"""What every pair of layouts costs on an edge, each distinct (shape, layout pair) priced once and shared between edges.

An ordinary edge pays the forward change and its backward dual. A parameter's edge differs: it may be read twice (gathered
again for backward), and its gradient rests as the parameter does, so a sum over ranks must be reduced there, not left open.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.distributed.tensor import Shard

from shardwright.cluster import Mesh
from shardwright.costs.layouts import dual
from shardwright.costs.redistribute import conversion_matrix
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
        self, tensor: Tensor, sources: Sequence, needs: Sequence, reads: int = 0, again: bool = False
    ) -> np.ndarray:
        """Seconds of every change from a source to a need.

        ``reads`` is how often a parameter is read, 0 for what is no parameter; ``again`` says that the reader belongs to a
        recomputed block, so the forward change happens twice.
        """
        grad = tensor.grad and self.training
        # Lists of layouts are shared between repeats, so their identity is enough for most look-ups.
        quick = (tensor.shape, tensor.dtype, grad, reads, again, id(sources), id(needs))
        if quick in self._matrices:
            return self._matrices[quick]
        key = (tensor.shape, tensor.dtype, grad, reads, again, tuple(sources), tuple(needs))
        if key not in self._matrices:
            distinct, wanted = list(dict.fromkeys(sources)), list(dict.fromkeys(needs))
            total = self._distinct(tensor, grad, distinct, wanted, reads, again)
            self._matrices[key] = total[np.ix_(places(sources, distinct), places(needs, wanted))]
        self._alive += [sources, needs]  # an identity is only unique while its object lives
        self._matrices[quick] = self._matrices[key]
        return self._matrices[key]

    def _distinct(
        self, tensor: Tensor, grad: bool, sources: list[Layout], needs: list, reads: int, again: bool
    ) -> np.ndarray:
        shape, dtype = tensor.shape, tensor.dtype
        there, back = conversion_matrix(shape, dtype, sources, needs, self.mesh, grad=grad and not reads)
        if not reads:
            return there * (2 if again else 1) + back
        if grad:
            there = there * reads
            back = conversion_matrix(shape, dtype, [dual(n) for n in needs], sources, self.mesh, grad=False)[0].T
        return np.where(self._forbidden(sources, needs), np.inf, (there + back) * (1.0 - self.overlap))

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
