"""Runs the program of one stage, pass by pass: forward, the gradients of its inputs, those of its weights.

Gradients of parameters are kept back and added up from micro-batch to micro-batch; bringing them home (sums between
replicas, deposit) is a part of the program that runs once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwright.program import Program
from shardwright.program.instructions import REDUCE
from shardwright.program.passes import reduced_apart
from shardwright.runtime.actions import Run
from shardwright.runtime.execution import Rank
from shardwright.runtime.executor import Executor
from shardwright.runtime.homeward import KeptBack
from shardwright.schedules import INPUT


class StageExecutor(Executor):
    """The program of a stage for micro-batches of one size."""

    def __init__(self, program: Program, rank: Rank) -> None:
        super().__init__(reduced_apart(program), rank)
        self.gradients = rank.gradients
        halves, way = program.sections.get(INPUT), set(self.program.sections[REDUCE])
        self._weights_from = None if halves is None else len(halves)
        self._homeward = [row for row in self._backward if row[0] in way]

    def backward_inputs(self, run: Run, gradients: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
        """The first half of a backward pass; gives the gradients of the inputs, by their values."""
        for value, slot in self.program.roots.items():
            run.slots[slot] = gradients.get(value)
        with torch.no_grad():
            self._perform(self._fused("inputs", self._backward[: self._weights_from]), run)
        found: dict[int, Tensor | None] = {}
        for name in (entry.tensor for entry in self.flow.graph.inputs if entry.tensor is not None):
            value = self.flow.rest[name]
            if value in self.program.gradients:
                found[value] = run.slots[self.program.gradients[value]]
        return found

    def backward_weights(self, run: Run) -> None:
        """The second half."""
        with torch.no_grad():
            self._perform(self._fused("weights", self._backward[self._weights_from :]), run)
        run.spent, run.slots = True, []

    def bring_home(self, kept_back: KeptBack) -> None:
        """Sum gradients that were kept back between replicas and give them to the parameters."""
        before, self.home.kept_back, self.gradients.hold = self.home.kept_back, kept_back, False
        try:
            with torch.no_grad():
                self._perform(self._homeward, Run([None] * len(self.program.slots)))
        finally:
            self.home.kept_back, self.gradients.hold = before, True
