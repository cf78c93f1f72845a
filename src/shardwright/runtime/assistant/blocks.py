"""Blocks moved between the stages of a pipeline, between two steps, without a restart.

A stage that has become slower gives blocks to its neighbours: the same graph is cut elsewhere
(:mod:`shardwright.plans.blocks`), and parameters and optimizer state travel from stage to stage
(:mod:`~shardwright.runtime.moving`). What a stage has is counted in blocks of the model; what stands before the first and
after the last of them stays where it is. Where several stages are on the same ranks, these give and take for all of them,
and each stage keeps a block at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwright.errors import RunError
from shardwright.graph import Op
from shardwright.graph.repeats import block_paths
from shardwright.plans import Plan
from shardwright.plans.blocks import blocks_of, with_blocks
from shardwright.runtime.assistant.drop_ranks import Plans
from shardwright.runtime.assistant.mover import Mover
from shardwright.runtime.assistant.prices import outside_part
from shardwright.runtime.module import ParallelModule


@dataclass(frozen=True)
class BlockCounts:
    """How many blocks can be moved of those of every device of the schedule: all but one in each further stage of it."""

    rows: tuple[int, ...]
    unit: int = 1
    weights: bool = True
    what: str = "blocks"


class BlockMover(Mover):
    """Moves blocks between the devices of one module's schedule."""

    def __init__(self, module: ParallelModule, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            raise RunError(
                "Parameters move with the blocks of a pipeline, and nobody said which optimizer has state of them.",
                "Call shardwright.assist(model, optimizer).",
            )
        plan = module.plan
        place = plan.schedule.device_of
        self._stages = [[n for n, own in enumerate(place) if own == d] for d in range(plan.schedule.devices)]
        """Of every device; a rank that is slow is so in all of them."""
        counts = blocks_of(plan, module.graph)
        super().__init__(module, optimizer, BlockCounts(tuple(self._movable(counts, own) for own in self._stages)))
        self.droppable = self.droppable and len(self._stages) == len(place)  # one stage of several cannot be left out

    def _movable(self, counts: Sequence[int], own: Sequence[int]) -> int:
        return sum(counts[number] for number in own) - len(own) + 1

    @property
    def ranks(self) -> list[list[int]]:
        """Those of every device."""
        return [list(self._plan.stages[own[0]].ranks) for own in self._stages]

    @cached_property
    def fixed(self) -> float:
        """By prices, what this rank does before the first block and after the last, and of blocks that stay."""
        paths = block_paths(self._module.graph)

        def inside(op: Op) -> bool:
            return any(op.module == path or op.module.startswith(f"{path}.") for path in paths)

        counts, stages = blocks_of(self._plan, self._module.graph), self._module._stages
        outside = (
            outside_part(stages.largest(n), self._plan.meshes[n], inside, counts[n]) for n in stages.own if counts[n]
        )
        return sum(outside) + len(stages.own) - 1

    def plans(self) -> Plans:
        """The plan with other blocks in its stages; where one has none, without it."""
        plan, graph = self._plan, self._module.graph

        def plan_for(rows: tuple[int, ...]) -> Plan:
            counts = list(blocks_of(plan, graph))
            for count, own in zip(rows, self._stages, strict=True):
                while (more := count - self._movable(counts, own)) != 0:
                    chosen = (min if more > 0 else max)(own, key=lambda number: counts[number])
                    counts[chosen] += 1 if more > 0 else -1
            return with_blocks(plan, graph, counts)

        return plan_for
