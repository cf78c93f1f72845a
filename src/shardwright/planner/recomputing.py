"""How many blocks of a strategy recompute: no more than memory asks for.

A search decides whether all blocks recompute (everything, or what is cheap) or none. Blocks are equal: what one of them
keeps is the difference that all of them make, so the bytes that are free tell how many need not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.operators.strategy import Strategy
from shardwright.planner.glance import SLACK

if TYPE_CHECKING:
    from shardwright.planner.trials import Found, Trials

NEARBY_COUNTS = 3
"""So many numbers of recomputed blocks are simulated, from the one that should just fit: it may be off by one."""

MOSTLY = 0.8
"""What one block keeps is at least this share of what all of them do on average."""


def recomputed_note(strategy: Strategy) -> str:
    """What a strategy recomputes, in words; nothing where it does not."""
    light = [path for path in strategy.recomputed if path in strategy.lightly]
    whole = [path for path in strategy.recomputed if path not in strategy.lightly]
    said = [f"activations of {_blocks(whole)} are recomputed in backward"] if whole else []
    said += [f"of {_blocks(light)} only what is cheap to compute is recomputed"] if light else []
    return "; ".join(said)


def _blocks(paths: Sequence[str]) -> str:
    return f"{len(paths)} blocks ({paths[0]}, …)" if len(paths) > 1 else f"1 block ({paths[0]})"


def recomputing_less(trials: Trials, found: Found, beat: float) -> Iterator[Found]:
    """The same with as few of its blocks recomputed as fit, simulated event by event: the first ones, whose activations are
    held longest; of the others nothing recomputes, or what is cheap. Nothing where no such plan could take less than
    ``beat`` seconds.

    >>> min(recomputing_less(trials, found, found.seconds), key=lambda less: less.seconds)       # doctest: +SKIP
    """
    found = trials.exactly(found)
    mesh, strategy, room = found.mesh, found.strategy, trials.limit(found.mesh) - found.memory_bytes
    count, alike = len(strategy.recomputed), found.searched.formulation.within.fold
    for others_lightly in (False,) if strategy.lightly else (False, True):
        none = replace(found.searched, strategy=_first_recomputed(strategy, 0, others_lightly))
        free = (trials.glanced(mesh, none) if alike else None) or trials.simulated(mesh, none)
        each = (free.memory_bytes - found.memory_bytes) / count
        if free.step_seconds >= (1 + SLACK) * beat or each <= 0.0:
            continue
        first, turn = max(count - int(room / each), 0), 0
        for _ in range(NEARBY_COUNTS):
            searched = replace(found.searched, strategy=_first_recomputed(strategy, first, others_lightly))
            less = replace(found, searched=searched, prediction=trials.simulated(mesh, searched), exact=True)
            yield less
            beat = min(beat, less.seconds) if less.fits else beat
            turn = turn or (-1 if less.fits else 1)  # fewer while they fit, or more until they do
            first += turn
            if less.fits != (turn < 0) or not 0 <= first < count:
                break
            if turn < 0 and less.memory_bytes + MOSTLY * each > trials.limit(mesh):
                break  # there is no room for what one more would keep


def _first_recomputed(strategy: Strategy, count: int, others_lightly: bool) -> Strategy:
    """The same with only the first so many of its recomputed blocks recomputed, of the others what is cheap or nothing."""
    blocks = strategy.recomputed
    if others_lightly:
        return replace(strategy, lightly=frozenset(blocks[count:]))
    return replace(strategy, recomputed=blocks[:count], lightly=strategy.lightly & frozenset(blocks[:count]))
