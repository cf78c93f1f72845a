"""What a program runs among."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from shardwright.program.steps import Line


class Surroundings(Protocol):
    """What a program runs among: this rank's device, its process groups, its parameters."""

    @property
    def device(self) -> torch.device: ...
    @property
    def compute_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...
    @property
    def compiled(self) -> bool:
        """Whether runs of instructions are compiled into one function each."""

    @property
    def hold(self) -> bool:
        """Whether gradients are kept back, as the first passes of an accumulation want it."""

    def line(self, line: Line) -> Line: ...
    def held(self, tensor: str) -> Any: ...
