"""What an assistant can move, and what it knows of the ranks that share it.

A module on one mesh has one lever: rows of the batch, or parts of cut loops. A pipeline has one in every stage whose ranks
share such things, and, dearer, its blocks between stages. The cheapest that gains is pulled first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shardwright.errors import RunError, ShardwrightError
from shardwright.program.steps import Line
from shardwright.runtime.assistant.blocks import BlockMover
from shardwright.runtime.assistant.fewer import Plans
from shardwright.runtime.assistant.moving import Mover
from shardwright.runtime.assistant.replicas import stage_movers
from shardwright.runtime.assistant.watching import Rule, Watch
from shardwright.runtime.module import ParallelModule

WORK, WAITED, UPDATE, FIXED = range(4)
"""Columns of what ranks tell each other of a step; from the last on, one for every lever."""


class Dealt(Protocol):
    """How the work is dealt out: how much of ``what`` every share has, moving in units; ``weights``: with parameters."""

    @property
    def rows(self) -> tuple[int, ...]: ...
    @property
    def unit(self) -> int: ...
    @property
    def weights(self) -> bool: ...
    @property
    def what(self) -> str: ...


class Moves(Protocol):
    """Moves shares of a module's work."""

    lines: list[Line]
    """Groups of ranks; gathered along one after the other, what all ranks say is known to all."""
    traces: bool

    @property
    def shares(self) -> Dealt: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def held_back(self) -> bool: ...
    @property
    def places(self) -> list[list[int]]:
        """For every share, whose it is: positions in what is gathered along the lines."""
        ...

    @property
    def ranks(self) -> list[list[int]]:
        """For every share, whose it is: ranks of the job."""
        ...

    @property
    def fixed(self) -> float:
        """Of this rank's work, by prices, what does not move with the shares, in units of what is dealt out."""
        ...

    @property
    def droppable(self) -> bool:
        """Whether a share can be given nothing, and its ranks be left out."""
        ...

    def move(self, rows: tuple[int, ...]) -> bool: ...
    def plans(self) -> Plans:
        """How the work would be dealt out otherwise, from how it is now."""
        ...


@dataclass
class Lever:
    """A mover, and the watch of those that share what it moves."""

    mover: Moves
    rule: Rule
    watch: Watch = field(init=False)
    fixed: float = field(init=False)
    """Of this rank, asked for once: prices take longer than what is allowed in a step."""

    def __post_init__(self) -> None:
        self.fixed = self.mover.fixed
        self.watch = Watch(self.units(self.mover.shares.rows), self.rule, self.mover.droppable)

    @property
    def rows(self) -> tuple[int, ...]:
        return self.mover.shares.rows

    def units(self, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(count // self.mover.shares.unit for count in rows)

    def see(self, first: int, table: NDArray[np.float64], number: int) -> None:
        """What all ranks saw of some steps, the first of them ``first``; this is lever ``number``."""
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


def levers_of(module: ParallelModule, optimizer: torch.optim.Optimizer | None, rule: Rule) -> list[Lever]:
    """Whatever can be moved in a module, the cheapest first; every rank that works calls this.

    Raises
    ------
    RunError
        When nothing can, with the reason.
    """
    if module._stages.on_one_mesh:
        return [Lever(Mover(module, optimizer), rule)]
    found: list[Moves] = list(stage_movers(module, optimizer))
    try:
        found.append(BlockMover(module, optimizer))
    except ShardwrightError as error:
        if not found:
            raise RunError(error.message, error.remedy) from None
    return [Lever(mover, rule) for mover in found]


def instructions_of(module: ParallelModule) -> int:
    """How many a move has to build anew."""
    return max((len(part.executor.program.instructions) for part in module._planned.parts.values()), default=0)
