"""Parameters that several stages hold: their gradients are summed between the stages, so that the copies stay alike.

Stages on meshes of the same sizes may hold it in any one layout, and ranks that hold the same part meet. Stages of unlike
sizes hold it whole: every rank of a stage has the same gradient then, and one of them brings it where several meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwright._torch_compat import local_of
from shardwright.errors import RunError
from shardwright.program.pipeline import Pipeline
from shardwright.waiting import wait_for


@dataclass(frozen=True, eq=False)
class Tie:
    """A parameter of several stages; ``group``: the ranks that meet, where this is one of them; ``brings``: whether it
    stands for its stage there."""

    tensor: str
    trained: bool
    group: Any
    brings: bool

    @staticmethod
    def of(pipeline: Pipeline, name: str, owners: Sequence[int]) -> Tie:
        """Every rank calls this, for the same parameters in the same order."""
        strategies = [pipeline.stages[owner].strategy for owner in owners]
        alike = {(strategy.sizes, strategy.resting[name]) for strategy in strategies}
        whole = all(placement.is_replicate() for _, layout in alike for placement in layout)
        if len(alike) > 1 and not whole:
            raise RunError(
                f"Stages {', '.join(map(str, owners))} share {name} and hold it in different ways: "
                f"{sorted(map(str, alike))}.",
                "Give these stages meshes of the same sizes and the same layout of that parameter, or let it lie whole.",
            )
        mine, brings, rank = None, False, dist.get_rank()
        for meeting in pipeline.meetings(owners):
            group = dist.new_group([one for own in meeting for one in own])
            for own in meeting:
                if rank in own:
                    mine, brings = group, rank == own[0]
        parts = next(iter(pipeline.parts.values()))
        trained = any(parts[owner].graph.parameter_of[name].trainable for owner in owners)
        return Tie(name, trained, mine, brings)

    def add_up(self, parameter: Any, before: Any) -> None:
        """Sum this step's gradients between the owners; ``before``: what the parameter had already."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif not self.brings:
            local_of(parameter.grad).zero_()
        wait_for(dist.all_reduce(local_of(parameter.grad), group=self.group, async_op=True))
        if before is not None:
            parameter.grad = before.add_(parameter.grad)
