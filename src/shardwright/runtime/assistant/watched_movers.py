"""What an assistant can move, and what it knows of the ranks that share it.

A module on one mesh has one mover: of rows of the batch, or of parts of cut loops. A pipeline has one in every stage whose
ranks share such things, and, dearer, one of blocks between stages. The cheapest that gains goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from shardwright.errors import RunError, ShardwrightError
from shardwright.runtime.assistant.blocks import BlockMover
from shardwright.runtime.assistant.mover import Mover
from shardwright.runtime.assistant.replicas import stage_movers
from shardwright.runtime.assistant.watching import Rule, SpeedWatch
from shardwright.runtime.module import ParallelModule

WORK, WAITED, UPDATE, FIXED = range(4)
"""Columns of what ranks tell each other of a step; from the last on, one for every mover."""


@dataclass
class WatchedMover:
    """A mover, and the watch of those that share what it moves."""

    mover: Mover
    rule: Rule
    watch: SpeedWatch = field(init=False)
    fixed: float = field(init=False)
    """Of this rank, asked for once: prices take longer than what is allowed in a step."""

    def __post_init__(self) -> None:
        self.fixed = self.mover.fixed
        self.watch = SpeedWatch(self.units(self.mover.shares.rows), self.rule, self.mover.droppable)

    @property
    def rows(self) -> tuple[int, ...]:
        return self.mover.shares.rows

    def units(self, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(count // self.mover.shares.unit for count in rows)

    def see(self, first: int, table: NDArray[np.float64], number: int) -> None:
        """What all ranks saw of some steps, the first of them ``first``; this is mover ``number``."""
        # Ranks that share one part of the work wait for each other: the part is as slow as the slowest of them.
        places = self.mover.places
        parts = [table[place] for place in places]
        work, update, fixed = (np.stack([p[..., c].max(0) for p in parts]) for c in (WORK, UPDATE, FIXED + number))
        waited = np.stack([part[..., WAITED].min(0) for part in parts])
        inside = {rank for place in places for rank in place}
        outside = table[[rank for rank in range(len(table)) if rank not in inside], :, WORK]
        others = outside.max(axis=0, initial=0.0)
        self.watch.priced(fixed[:, 0])
        for place in range(table.shape[1]):
            apart = () if self.mover.shares.weights else update[:, place]  # the update of a parameter goes with it
            self.watch.add(first + place, work[:, place], waited[:, place], apart, float(others[place]))
        self.watch.learn()


def watched_movers(module: ParallelModule, optimizer: torch.optim.Optimizer | None, rule: Rule) -> list[WatchedMover]:
    """Whatever can be moved in a module, the cheapest first; every rank that works calls this.

    Raises
    ------
    RunError
        When nothing can, with the reason.
    """
    if module._options.inputs == "local":
        raise RunError(
            "Every rank is given its own part of the batch (inputs='local'), so no rows can be moved between ranks.",
            "Give every rank the whole batch (parallelize(..., inputs='whole')).",
        )
    found, reasons = stage_movers(module, optimizer)
    movers: list[Mover] = [*found]
    if len(module.plan.stages) > 1:
        try:
            movers.append(BlockMover(module, optimizer))
        except ShardwrightError as error:
            reasons.append(RunError(error.message, error.remedy))
    if not movers:
        raise reasons[-1]
    return [WatchedMover(mover, rule) for mover in movers]


def instructions_of(module: ParallelModule) -> int:
    """How many a move has to build anew."""
    return max((len(part.executor.program.instructions) for part in module._planned.parts.values()), default=0)
