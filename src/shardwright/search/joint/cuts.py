"""Where a graph may be cut into stages, whoever asks: one interface for runs of blocks, ideals, operators in their order and
named modules.

Cuts are numbered so that values flow from lower to higher ones; the first has nothing before it, the last everything. A
stage leads from one cut to another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from shardwright.errors import ProblemError
from shardwright.search.joint.problem import Floats


class Cuts(Protocol):
    """The cuts of a graph."""

    @property
    def count(self) -> int:
        """How many there are."""

    def even(self, stages: int) -> Sequence[int] | None:
        """Cuts between which there is about equal work for so many stages; nothing where there are none."""

    def operators(self, start: int, end: int) -> tuple[str, ...]:
        """Operators between two cuts, by name."""


class PricedCuts(Cuts, Protocol):
    """Cuts between which stages are priced by what they have in common."""

    @property
    def halves(self) -> bool:
        """Whether half of what a group of devices has can be each of two stages."""

    @property
    def between(self) -> str:
        """What stages are cut between: ``blocks`` of a run, or ``ideals`` of a graph's pieces."""

    @property
    def nested(self) -> np.ndarray:
        """[a, b]: whether a stage leads from cut a to b."""

    def next_to(self, cut: int, by: int) -> tuple[int, ...]:
        """The cuts that are one block or piece before (``by`` -1) or after (1) one."""

    def kinds(self, start: np.ndarray, end: np.ndarray, both_ends: bool = False) -> np.ndarray:
        """What prices of stages between cuts depend on, as columns. ``both_ends``: who has the first operators of the model
        has the last too."""

    def borders(self, kinds: np.ndarray) -> tuple[Floats, Floats]:
        """Bytes of a micro-batch that stages receive, and that they send."""

    def number(self, cut: int) -> int:
        """How many blocks lie before a cut; of ideals its own number."""

    def cut_at(self, number: int) -> int:
        """The inverse of :meth:`number`."""


def cut_into(cuts: Cuts, stages: int) -> list[tuple[str, ...]]:
    """Operators of so many stages with about equal work.

    Raises
    ------
    ProblemError
        When there are none.
    """
    chosen = cuts.even(stages)
    if chosen is None:
        raise ProblemError(
            f"The model cannot be cut into {stages} stages: there are {cuts.count - 1} pieces of it to make them of.",
            "Ask for another number of stages, or cut at other modules.",
        )
    return [cuts.operators(a, b) for a, b in itertools.pairwise(chosen)]
