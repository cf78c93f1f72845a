"""A running job as it was measured, and a way to share its work.

A job has replicas of a pipeline; each worker (replica, stage) takes some seconds for the forward and the backward
pass of one micro-batch. What the median replica takes for a stage is taken as the work in that stage, and how much
longer a worker takes as its slowness. Work is a line from 0 to the number of stages, in units of the stages as they
were; a replica's cuts say which part of it each of its stages has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import ProblemError

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Job:
    """Seconds [replica, stage] per micro-batch; ``microbatches`` of all replicas together; ``fixed`` seconds beside
    the pipeline.

    >>> job = Job([[1.0], [2.0]], [[2.0], [4.0]], microbatches=9)
    >>> job.replicas, job.stages, job.speed.tolist()
    (2, 1, [[1.5], [0.75]])
    """

    forward: Floats
    backward: Floats
    microbatches: int
    hop: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            table = np.asarray(getattr(self, name), float)
            if table.ndim != 2 or 0 in table.shape or not np.isfinite(table).all() or (table <= 0).any():
                raise ProblemError(
                    f"{name} is not a table [replica][stage] of positive seconds.",
                    "Give every worker's measured seconds.",
                )
            object.__setattr__(self, name, table)
        if self.forward.shape != self.backward.shape:
            raise ProblemError(
                f"forward has the shape {self.forward.shape}, backward {self.backward.shape}.",
                "Measure both everywhere.",
            )
        if self.microbatches < self.replicas:
            raise ProblemError(
                f"{self.microbatches} micro-batches for {self.replicas} replicas.",
                "Every replica needs one: leave some out.",
            )

    @property
    def replicas(self) -> int:
        return int(self.forward.shape[0])

    @property
    def stages(self) -> int:
        return int(self.forward.shape[1])

    @cached_property
    def work(self) -> tuple[Floats, Floats]:
        """Seconds of the forward and the backward pass of each stage's work on a median worker."""
        return np.median(self.forward, axis=0), np.median(self.backward, axis=0)

    @cached_property
    def speed(self) -> Floats:
        """How fast each worker is, [replica, stage]; 1 is the median worker of its stage."""
        return (self.work[0] + self.work[1]) / (self.forward + self.backward)

    def split(self, replica: int, cuts: Sequence[float]) -> tuple[Floats, Floats]:
        """Seconds of a replica's stages for one micro-batch, forward and backward, with its work cut at ``cuts``."""
        borders = np.concatenate([[0.0], np.asarray(cuts, float), [float(self.stages)]])
        marks = np.arange(self.stages + 1)
        answers = []
        for work, seconds in zip(self.work, (self.forward, self.backward), strict=True):
            amount = np.diff(np.interp(borders, marks, np.concatenate([[0.0], np.cumsum(work)])))
            answers.append(amount * seconds[replica] / work)
        return answers[0], answers[1]


@dataclass(frozen=True)
class Balance:
    """Micro-batches of every replica, and where each replica's work is cut between its stages."""

    shares: tuple[int, ...]
    cuts: tuple[tuple[float, ...], ...]

    def describe(self) -> str:
        """In words.

        >>> Balance((3, 5), ((1.0,), (0.75,))).describe()
        'micro-batches 3, 5; replica 1 cut at 0.75'
        """
        moved = [
            f"replica {replica} cut at {', '.join(f'{cut:.3g}' for cut in cuts)}"
            for replica, cuts in enumerate(self.cuts)
            if any(cut != place for place, cut in enumerate(cuts, 1))
        ]
        return "; ".join([f"micro-batches {', '.join(map(str, self.shares))}", *moved])


def as_run(job: Job) -> Balance:
    """Equal shares (the first replicas take what is left over) and the stages as they are."""
    share, rest = divmod(job.microbatches, job.replicas)
    whole = tuple(float(cut) for cut in range(1, job.stages))
    return Balance(tuple(share + (replica < rest) for replica in range(job.replicas)), (whole,) * job.replicas)
