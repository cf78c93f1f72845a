"""What the joint search is asked about and answers with: a model's blocks, a pipeline's stages, the predicted step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.cluster import Mesh
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.search.solution import gap_of


@dataclass(frozen=True)
class JointStage:
    """Blocks ``first_block``..``last_block`` (exclusive) on ``devices`` devices from ``first_device`` on; of them
    ``recomputed_blocks`` recompute all their activations, ``lightly_blocks`` what is cheap. Of a general graph: what lies
    between the ideals with these numbers, its ``operators``."""

    first_block: int
    last_block: int
    first_device: int
    mesh: Mesh
    strategy_name: str
    strategy: Strategy
    recomputed_blocks: int
    lightly_blocks: int
    holds: int
    seconds: float
    closing_seconds: float
    memory_bytes: float
    operators: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return self.mesh.devices


@dataclass(frozen=True)
class JointPlan:
    """A pipeline: its stages, micro-batches and schedule, the predicted step, and what no pipeline of the space
    undercuts.
    """

    stages: tuple[JointStage, ...]
    microbatch: int
    microbatches: int
    schedule: str
    step_seconds: float
    bound_seconds: float
    search_seconds: float
    boundary_bytes: float = 0.0
    """What a device sends to other stages in one step, at most."""
    unhidden_seconds: float = 0.0
    """About what the step takes at least, were all traffic of parameters hidden under computation."""

    @property
    def groups(self) -> tuple[int, ...]:
        """Devices of every group that runs one stage or several, in their order."""
        return tuple({stage.first_device: stage.devices for stage in sorted(self.stages, key=_first)}.values())

    @property
    def gap(self) -> float:
        """How far above the fastest pipeline of its space the step may be."""
        return gap_of(self.step_seconds, self.bound_seconds)


def _first(stage: JointStage) -> int:
    return stage.first_device


@dataclass(frozen=True)
class Model:
    """Where the graph of one micro-batch comes from, and how many blocks the whole model has (more than the graph may
    have).
    """

    graph_at: Callable[[int], Graph]
    blocks: int | None = None
