"""A job goes on without ranks that are so slow that the others are faster alone, and takes them back.

Nobody leaves the job: a rank that is left out holds no parameter, computes nothing, and looks on. It is told every loss,
takes part in checkpoints, and from time to time measures its own speed (:func:`reference_speed`); when it is fast enough
again to be worth its share, it gets it back. A plan for fewer ranks is one with stages that are on some of the ranks only:
the same graph, with an axis shorter, or a stage less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan, Stage
from shardwright.program import FixedDecisions
from shardwright.runtime.assistant.watching import Rule, Verdict, dealt

Plans = Callable[[tuple[int, ...]], Plan]
"""The plan that deals the work out in such rows; where a share has none, without its ranks."""
REFERENCE_SECONDS = 0.3
"""Long enough for schedulers and clocks that slow a process down in turns."""
LOOK_EVERY = 16
"""Steps between two looks at those that were left out, at least; measuring takes a twentieth of the time at most."""


def without_ranks(stage: Stage, shares: Any, rows: Sequence[int]) -> Stage:
    """A stage with its axis dealt out in these rows; where one has none, without the ranks that would have it."""
    strategy, axis = stage.strategy, shares.axis
    kept = [index for index, count in enumerate(rows) if count]
    counts = [rows[index] for index in kept]
    ranks = torch.tensor(stage.ranks).view(strategy.sizes).index_select(axis, torch.tensor(kept))
    axes = tuple((name, len(kept) if n == axis else size) for n, (name, size) in enumerate(strategy.axes))
    others = {name: part for name, part in strategy.shares.items() if name != shares.name}
    dealt_out = {} if len(kept) == 1 else {shares.name: tuple(count / sum(counts) for count in counts)}
    strategy = replace(strategy, axes=axes, shares={**others, **dealt_out})
    alone = _uncut(strategy, axis) if len(kept) == 1 else strategy
    decisions = stage.decisions if len(kept) == len(rows) else FixedDecisions(sizes=stage.decisions.sizes)
    return replace(stage, ranks=tuple(ranks.flatten().tolist()), strategy=alone, decisions=decisions, prediction=None)


def _uncut(strategy: Strategy, axis: int) -> Strategy:
    """An axis with one rank cuts nothing."""

    def without(entries: Sequence[Any], nothing: Any) -> tuple[Any, ...]:
        return tuple(nothing if place == axis else entry for place, entry in enumerate(entries))

    return replace(
        strategy,
        splits={name: without(split, None) for name, split in strategy.splits.items()},
        resting={name: without(layout, Replicate()) for name, layout in strategy.resting.items()},
        kept={name: without(layout, Replicate()) for name, layout in strategy.kept.items()},
    )


def reference_speed(device: torch.device) -> float:
    """Multiplications of small matrices per second, on the host or the device that a rank computes with."""
    size = 2048 if device.type == "cuda" else 192
    matrix = torch.zeros(size, size, device=device)
    began, count = perf_counter(), 0
    while perf_counter() - began < REFERENCE_SECONDS:
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count += 1
    return count / (perf_counter() - began)


@dataclass(frozen=True)
class Absence:
    """Ranks that were left out: of which shares, and how fast everybody was then."""

    found: Verdict
    """That asked for it: the shares that have nothing are theirs."""
    ranks: tuple[tuple[int, ...], ...]
    """Whose every share was."""
    plans: Plans
    """With all ranks."""
    every: int
    """Steps between two looks."""
    speed: float
    """The reference speed of this rank when it was left out, if it was."""

    @property
    def left_out(self) -> dict[int, int]:
        """The ranks that look on, and the share that each had a part in."""
        return {rank: place for place, count in enumerate(self.found.rows) if not count for rank in self.ranks[place]}

    def slowness(self, rank: int, device: torch.device) -> float:
        """Of a rank that was left out, relative to the others, by its reference speed then and now; it asks this itself."""
        return self.found.slowness[self.left_out[rank]] * self.speed / reference_speed(device)

    def rows_with(self, slowness: Mapping[int, float], rule: Rule, move_seconds: float) -> Verdict | None:
        """What to deal out with those back whose slowness is now this, by rank; nothing where that gains too little."""
        found, costs = self.found, list(self.found.slowness)
        for place in set(self.left_out.values()):  # a share is as slow as the slowest of its ranks
            known = [own for other, own in slowness.items() if self.left_out[other] == place]
            costs[place] = max(known)

        def longest(rows: Sequence[int], costs: Sequence[float]) -> float:
            return max(costs[place] * (count + found.fixed[place]) for place, count in enumerate(rows) if count)

        rows = dealt(sum(found.rows), costs, found.fixed, rule.gain)
        part = longest(rows, costs) / longest(found.rows, found.slowness)
        if 1 - part < rule.gain or (1 - part) * rule.steps * found.expected < move_seconds:
            return None
        place = next(p for p, (count, now) in enumerate(zip(found.rows, rows, strict=True)) if now and not count)
        expected = found.expected * part
        return Verdict(rows, tuple(costs), place, found.since, found.expected, expected, expected, found.fixed)


def look_every(step_seconds: float, again: int) -> int:
    """Steps between two looks at those that were left out; ``again``: how often they had come back and failed.

    >>> look_every(1.0, 0), look_every(0.1, 0), look_every(1.0, 2)
    (16, 61, 64)
    """
    return max(LOOK_EVERY, int(20 * REFERENCE_SECONDS / max(step_seconds, 1e-6)) + 1) << min(again, 6)
