"""One judge for all proposals: what may be faster than the fastest so far is simulated, the rest is passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import TypeVar

from shardwright.planner.proposals import Proposal

NEARLY = 0.98
"""A strategy's own seconds that nothing hides are known before it is simulated, to within this factor."""

Found = TypeVar("Found", bound=Proposal)


def judge(
    proposals: Iterable[Found], simulated: Callable[[Found], Found], beat: float = inf, room: float = inf
) -> Iterator[Found]:
    """Every proposal that may take less than ``beat`` seconds a step, and than the fastest that fits before it, simulated.

    Proposals come as they are asked for, in the order of their bounds: one that cannot be below ends it. What is slower
    with all its traffic hidden is passed over. What needs more bytes than there is ``room`` for even by its search's count,
    which leaves things out, is handed on without being simulated.

    >>> [found.seconds for found in judge(proposals, simulated, beat=0.1)]                       # doctest: +SKIP
    """
    for proposal in proposals:
        if proposal.bound > beat:
            return
        if proposal.expected.memory_bytes > room:
            yield proposal
            continue
        if proposal.unhidden >= beat:
            continue
        found = simulated(proposal)
        yield found
        if found.fits:
            beat = min(beat, found.seconds)
