"""Blocks moved between the stages of a pipeline, between two steps, without a restart.

A stage that has become slower gives blocks to its neighbours: the same graph is cut elsewhere
(:mod:`shardwright.plans.blocks`), and parameters and optimizer state travel from stage to stage
(:mod:`~shardwright.runtime.moving`). What a stage has is counted in blocks of the model; what stands before the first and
after the last of them stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shardwright.errors import RunError, ShardwrightError
from shardwright.plans.blocks import blocks_of, with_blocks
from shardwright.program.steps import Line
from shardwright.runtime.moving import move
from shardwright.runtime.pipeline import PipelineModule


@dataclass(frozen=True)
class Blocks:
    """How many blocks every stage has."""

    rows: tuple[int, ...]
    unit: int = 1
    weights: bool = True
    what: str = "blocks"


class BlockMover:
    """Moves blocks between the stages of one module."""

    def __init__(self, module: PipelineModule, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            raise RunError(
                "Parameters move with the blocks of a pipeline, and nobody said which optimizer has state of them.",
                "Call shardwright.assist(model, optimizer).",
            )
        plan = module._stages.plan
        if plan.schedule is None or plan.schedule.devices != len(plan.stages):
            raise RunError(
                f"The plan has {len(plan.stages)} stages, several of them on the same ranks.",
                "Assist a pipeline with one stage on every device.",
            )
        self._module, self._optimizer, self._plan = module, optimizer, plan
        self.shares = Blocks(blocks_of(plan, module.graph))
        world = dist.group.WORLD
        assert world is not None
        self.lines = [Line(world.group_name, dist.get_world_size(), dist.get_rank())]
        self.device: torch.device = module._device
        self.traces = True

    @property
    def held_back(self) -> bool:
        """By no_sync(): the sums belong to the stages as they are."""
        return bool(self._module._waiting)

    @property
    def places(self) -> list[list[int]]:
        """The ranks of every stage."""
        return [list(stage.ranks) for stage in self._plan.stages]

    def move(self, rows: tuple[int, ...]) -> bool:
        """Give every stage so many blocks from the next step on; false where some rank cannot, and nothing has changed."""
        try:
            move(self._module, self._optimizer, with_blocks(self._plan, self._module.graph, rows))
        except ShardwrightError:
            return False
        if self.traces:
            for part in self._module._parts.values():
                part.executor.settle()
        self.shares = replace(self.shares, rows=rows)
        return True
