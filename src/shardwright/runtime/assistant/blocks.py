"""Blocks moved between the stages of a pipeline, between two steps, without a restart.

A stage that has become slower gives blocks to its neighbours: the same graph is cut elsewhere
(:mod:`shardwright.plans.blocks`), and parameters and optimizer state travel from stage to stage
(:mod:`~shardwright.runtime.moving`). What a stage has is counted in blocks of the model; what stands before the first and
after the last of them stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch

from shardwright.errors import RunError
from shardwright.graph import Op
from shardwright.graph.repeats import block_paths
from shardwright.plans.blocks import blocks_of, with_blocks
from shardwright.runtime.assistant.fewer import Plans
from shardwright.runtime.assistant.pipelined import PipelineMover
from shardwright.runtime.assistant.prices import outside_part
from shardwright.runtime.module import ParallelModule


@dataclass(frozen=True)
class Blocks:
    """How many blocks every stage has."""

    rows: tuple[int, ...]
    unit: int = 1
    weights: bool = True
    what: str = "blocks"


class BlockMover(PipelineMover):
    """Moves blocks between the stages of one module."""

    def __init__(self, module: ParallelModule, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            raise RunError(
                "Parameters move with the blocks of a pipeline, and nobody said which optimizer has state of them.",
                "Call shardwright.assist(model, optimizer).",
            )
        plan = module.plan
        if plan.schedule.devices != len(plan.stages):
            raise RunError(
                f"The plan has {len(plan.stages)} stages, several of them on the same ranks.",
                "Assist a pipeline with one stage on every device.",
            )
        super().__init__(module, optimizer, Blocks(blocks_of(plan, module.graph)))

    @property
    def ranks(self) -> list[list[int]]:
        """Those of every stage."""
        return [list(stage.ranks) for stage in self._plan.stages]

    @cached_property
    def fixed(self) -> float:
        """By prices, what this rank's stage does before the first block and after the last."""
        paths = block_paths(self._module.graph)

        def inside(op: Op) -> bool:
            return any(op.module == path or op.module.startswith(f"{path}.") for path in paths)

        (number,) = self._module._stages.own
        program = self._module._stages.largest(number)
        return outside_part(program, self._plan.meshes[number], inside, self.shares.rows[number])

    def plans(self) -> Plans:
        """The plan with other blocks in its stages; where one has none, without it."""
        return partial(with_blocks, self._plan, self._module.graph)
