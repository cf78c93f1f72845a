"""What every mover of a pipeline has in common: it makes a plan with other stages, and the module goes over to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch

from shardwright.errors import ShardwrightError
from shardwright.plans import Plan
from shardwright.runtime.assistant.fewer import Plans
from shardwright.runtime.module import ParallelModule
from shardwright.runtime.moving import move


class PipelineMover(ABC):
    """Deals the work of a pipeline's ranks out anew. ``shares``: how it is dealt out now, a frozen value with ``rows``."""

    def __init__(self, module: ParallelModule, optimizer: torch.optim.Optimizer | None, shares: Any) -> None:
        workers = module._stages.workers
        assert workers is not None  # ranks that only look on move nothing
        self._module, self._optimizer, self.shares = module, optimizer, shares
        self.lines, self.traces = [workers], True
        self.droppable = optimizer is not None
        self.device: torch.device = module._device
        module._planned.record_nothing()  # waits inside of replayed CUDA graphs are not seen by any clock

    @property
    def _plan(self) -> Plan:
        return self._module.plan

    @property
    def held_back(self) -> bool:
        """By no_sync(): the sums belong to the stages and shares as they are."""
        return bool(self._module._gradients.holding)

    @property
    @abstractmethod
    def ranks(self) -> list[list[int]]:
        """Whose every share is."""

    @property
    def places(self) -> list[list[int]]:
        """The same, counted among those that work."""
        workers = self._module.pipeline.workers
        return [[workers.index(rank) for rank in ranks] for ranks in self.ranks]

    @abstractmethod
    def plans(self) -> Plans:
        """The plan with other shares."""

    def move(self, rows: tuple[int, ...]) -> bool:
        """Deal the work out like this from the next step on; false where some rank cannot, and nothing has changed."""
        try:
            move(self._module, self._optimizer, self.plans()(rows))
        except ShardwrightError:
            return False
        self._module._planned.record_nothing()
        if self.traces:  # the operators of its stages at once, and not only after some passes
            self._module._planned.settle()
        self.shares = replace(self.shares, rows=rows)
        return True
