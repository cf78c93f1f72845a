"""What every mover has in common: it makes a plan that deals the work out otherwise, and the module goes over to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from shardwright.errors import ShardwrightError
from shardwright.plans import Plan
from shardwright.runtime.assistant.drop_ranks import Plans
from shardwright.runtime.module import ParallelModule
from shardwright.runtime.moving import move, refuse_held_back


class Mover(ABC):
    """Deals the work of a module's ranks out anew. ``shares``: how it is dealt out now, a frozen value that says how much of
    ``what`` every share has (``rows``), in which ``unit`` that moves, and whether parameters move with it (``weights``)."""

    def __init__(self, module: ParallelModule, optimizer: torch.optim.Optimizer | None, shares: Any) -> None:
        workers = module._stages.workers
        assert workers is not None  # ranks that only look on move nothing
        self._module, self._optimizer, self.shares = module, optimizer, shares
        self.lines, self.traces = [workers], True
        self.droppable = optimizer is not None and module._options.outputs == "whole"
        """Whether a share can be given nothing, and its ranks be left out: what they hold moves, and results are whole."""
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
        """For every share, whose it is: ranks of the job."""

    @property
    def places(self) -> list[list[int]]:
        """The same, counted among those that work."""
        workers = self._module.pipeline.workers
        return [[workers.index(rank) for rank in ranks] for ranks in self.ranks]

    @cached_property
    @abstractmethod
    def fixed(self) -> float:
        """Of this rank's work, by prices, what does not move with the shares, in units of what is dealt out."""

    @abstractmethod
    def plans(self) -> Plans:
        """How the work would be dealt out otherwise, from how it is now."""

    def move(self, rows: tuple[int, ...]) -> bool:
        """Deal the work out like this from the next step on; false where some rank cannot, and nothing has changed."""
        refuse_held_back(self._module)
        try:
            move(self._module, self._optimizer, self.plans()(rows))
        except ShardwrightError:
            return False
        self._module._planned.record_nothing()
        if self.traces:  # the operators of its stages at once, and not only after some passes
            self._module._planned.settle()
        self.shares = replace(self.shares, rows=rows)
        return True
