"""Parameters that several stages hold: their gradients are summed between the stages, so that the copies stay alike."""

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
    """A parameter of several stages; ``group``: the ranks that hold the same part of it, where this is one of them."""

    tensor: str
    trained: bool
    group: Any

    @staticmethod
    def of(pipeline: Pipeline, name: str, owners: Sequence[int]) -> Tie:
        """Every rank calls this, for the same parameters in the same order."""
        strategies = [pipeline.stages[owner].strategy for owner in owners]
        alike = {(strategy.sizes, strategy.resting[name]) for strategy in strategies}
        if len(alike) > 1:
            raise RunError(
                f"Stages {', '.join(map(str, owners))} share {name} and hold it in different ways: "
                f"{sorted(map(str, alike))}.",
                "Give these stages meshes of the same sizes and the same layout of that parameter.",
            )
        mine = None
        for ranks in zip(*(pipeline.stages[owner].ranks for owner in owners), strict=True):
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                mine = group
        parts = next(iter(pipeline.parts.values()))
        trained = any(parts[owner].graph.parameter_of[name].trainable for owner in owners)
        return Tie(name, trained, mine)

    def add_up(self, parameter: Any, before: Any) -> None:
        """Sum this step's gradients between the owners; ``before``: what the parameter had already."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        wait_for(dist.all_reduce(local_of(parameter.grad), group=self.group, async_op=True))
        if before is not None:
            parameter.grad = before.add_(parameter.grad)
