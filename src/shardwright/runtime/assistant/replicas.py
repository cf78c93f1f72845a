"""What the ranks of one stage share, moved between them: rows of every micro-batch, or parts of cut loops.

One mesh is the only stage of its plan. Replicas of a stage of several take rows of each micro-batch here, not micro-batches
of their own, so giving one of them less to do is dealing out the rows of its stage in other shares. The neighbouring stages
keep theirs: what crosses a border is cut by who holds which rows on either side (:mod:`shardwright.program.transfers`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist

from shardwright._torch_compat import group_named
from shardwright.errors import RunError
from shardwright.plans import Plan
from shardwright.program import Program
from shardwright.runtime.assistant.drop_ranks import Plans, without_ranks
from shardwright.runtime.assistant.movable import Shares, movable
from shardwright.runtime.assistant.mover import Mover
from shardwright.runtime.assistant.prices import uncut_part
from shardwright.runtime.module import ParallelModule


class StageMover(Mover):
    """Moves shares between the ranks of one stage."""

    def __init__(
        self, module: ParallelModule, optimizer: torch.optim.Optimizer | None, stage: int, shares: Shares
    ) -> None:
        super().__init__(module, optimizer, shares)
        self._stage = stage

    @property
    def ranks(self) -> list[list[int]]:
        """Whose every share is."""
        stage = self._plan.stages[self._stage]
        table = torch.tensor(stage.ranks).view(stage.strategy.sizes)
        return [table.select(self.shares.axis, index).flatten().tolist() for index in range(len(self.shares.rows))]

    @cached_property
    def fixed(self) -> float:
        """By prices, what this rank does of the stage whatever its share; nothing where it does nothing of it."""
        program = _program(self._module, self._stage)
        if program is None:
            return 0.0
        mesh = self._plan.meshes[self._stage]
        return uncut_part(program, mesh, self.shares.axis, self.shares.rows) / self.shares.unit

    def plans(self) -> Plans:
        """The plan with other shares in the stage; where one has nothing, without its ranks."""
        plan, number, shares = self._plan, self._stage, self.shares

        def plan_for(rows: tuple[int, ...]) -> Plan:
            stages = list(plan.stages)
            stages[number] = without_ranks(stages[number], shares, rows)
            return replace(plan, stages=tuple(stages))

        return plan_for


def stage_movers(
    module: ParallelModule, optimizer: torch.optim.Optimizer | None
) -> tuple[list[StageMover], list[RunError]]:
    """One for every stage whose ranks share something that can be moved, and why others have none; every rank that works
    calls this."""
    plan, line = module.plan, module._stages.workers
    reasons: list[RunError] = []
    if plan.schedule.devices != len(plan.stages) or line is None:
        return [], reasons  # ranks with several stages: what one of them takes longer is not known by itself
    mine: dict[int, Shares] = {}
    for number in range(len(plan.stages)):
        program = _program(module, number)
        if program is not None:
            try:
                mine[number] = movable(program)
            except RunError as reason:
                reasons.append(reason)
    every: list[dict[int, Shares]] = [{}] * line.size
    dist.all_gather_object(every, mine, group_named(line.group))
    found = []
    for number, shares in sorted({number: shares for told in every for number, shares in told.items()}.items()):
        if shares.weights and optimizer is None:
            reasons.append(
                RunError(
                    f"Along axis {shares.name!r} parameters move, and nobody said which optimizer has state of them.",
                    "Call shardwright.assist(model, optimizer).",
                )
            )
        else:
            found.append(StageMover(module, optimizer, number, shares))
    return found, reasons


def _program(module: ParallelModule, stage: int) -> Program | None:
    """What this rank does of a stage for the largest micro-batches."""
    part = module._planned.parts.get((stage, max(module.pipeline.parts)))
    return None if part is None else part.executor.program
