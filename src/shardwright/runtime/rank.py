"""What the programs of one module have in common on this rank, and what each finds of its own there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.program.steps import BoundStep, Line
from shardwright.runtime.boundary_steps import Inputs, Outputs


class Holds(Protocol):
    """What may hold gradients back."""

    def reduce(self) -> None:
        """Bring what is held back home, without another pass."""


@dataclass
class Gradients:
    """``hold`` keeps the gradients of a module back, as the first passes of an accumulation want it; ``holding`` are those
    that have kept some. ``compiled``: they are computed by compiled regions, and so are the results."""

    compiled: bool = False
    hold: bool = False
    holding: list[Holds] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Rank:
    """A program's surroundings: the mesh and the constants are its own, the rest is the module's."""

    mesh: DeviceMesh
    device: torch.device
    groups: Mapping[str, str]
    gradients: Gradients
    home: Mapping[str, tuple[dict[str, Any], str]]
    """Where each parameter and buffer is looked up: the place in its module, and its key there."""
    constants: Sequence[Tensor]
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    inputs: Inputs
    outputs: Outputs

    @property
    def compiled(self) -> bool:
        """Whether runs of instructions are compiled into one function each."""
        return self.gradients.compiled

    def held(self, tensor: str) -> Any:
        """The parameter or buffer behind a name of the graph, as it is now."""
        place, key = self.home[tensor]
        return place[key]

    def bound(self, steps: tuple[BoundStep, ...]) -> tuple[BoundStep, ...]:
        """Steps with the process groups in place of the axes' names."""
        return tuple(step._replace(line=self.line(step.line)) for step in steps)

    def line(self, line: Line) -> Line:
        return line._replace(group=self.groups[line.group])
