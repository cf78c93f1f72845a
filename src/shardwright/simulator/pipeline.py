"""Pipeline schedules as event simulations: stages that work through micro-batches in a given order.

A schedule is, per stage, the order of its jobs (forward or backward of a micro-batch); a job starts when its stage is
free and what it needs has arrived from the neighbouring stage, ``hop`` seconds after it was finished there. GPipe (Huang et
al. 2019) runs all forwards, then all backwards; 1F1B (PipeDream-Flush, Narayanan et al. 2021) alternates them after a
warm-up and holds fewer activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import ProblemError
from shardwright.simulator.engine import Schedule, run

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Job:
    """One micro-batch on one stage, or (``kind`` ``hop``) on its way to a neighbour. Jobs are what the engine runs."""

    kind: str
    stage: int
    microbatch: int
    stream: tuple[str, int]
    seconds: float
    after: tuple[int, ...] = ()
    host: float = 0.0


@dataclass(frozen=True)
class PipelineRun:
    """A simulated pipeline. ``span`` is the longest time from a stage's first job to the end of its last."""

    jobs: tuple[Job, ...]
    schedule: Schedule
    stages: int
    microbatches: int

    def stage_span(self, stage: int) -> float:
        mine = [i for i, job in enumerate(self.jobs) if job.stream == ("stage", stage)]
        return max(self.schedule.ends[i] for i in mine) - min(self.schedule.starts[i] for i in mine)

    @property
    def seconds(self) -> float:
        return self.schedule.seconds

    @property
    def span(self) -> float:
        return max(self.stage_span(stage) for stage in range(self.stages))

    @property
    def bubble(self) -> float:
        """Share of the span in which the stage with the longest span does not work."""
        stage = max(range(self.stages), key=self.stage_span)
        work = sum(job.seconds for job in self.jobs if job.stream == ("stage", stage))
        return 1 - work / self.stage_span(stage)

    def in_flight(self, stage: int) -> int:
        """The most micro-batches whose activations a stage holds at once."""
        now = most = 0
        for job in self.jobs:
            if job.stream == ("stage", stage):
                now += 1 if job.kind == FORWARD else -1
                most = max(most, now)
        return most


def gpipe(stages: int, microbatches: int) -> list[list[tuple[str, int]]]:
    """All forwards, then all backwards, the last micro-batch first."""
    once = [(FORWARD, i) for i in range(microbatches)] + [(BACKWARD, i) for i in reversed(range(microbatches))]
    return [list(once) for _ in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> list[list[tuple[str, int]]]:
    """A warm-up as deep as the stages that follow, then one forward and one backward in turn.

    >>> one_f_one_b(2, 2)[1]
    [('forward', 0), ('backward', 0), ('forward', 1), ('backward', 1)]
    """
    orders = []
    for stage in range(stages):
        warm = min(stages - stage - 1, microbatches)
        order = [(FORWARD, i) for i in range(warm)]
        for i in range(microbatches - warm):
            order += [(FORWARD, warm + i), (BACKWARD, i)]
        order += [(BACKWARD, i) for i in range(microbatches - warm, microbatches)]
        orders.append(order)
    return orders


def simulate_pipeline(
    orders: Sequence[Sequence[tuple[str, int]]],
    forward: Sequence[float],
    backward: Sequence[float],
    hop: float = 0.0,
) -> PipelineRun:
    """Run the stages' jobs in the given orders; ``forward`` and ``backward`` are seconds per stage.

    >>> run = simulate_pipeline(one_f_one_b(4, 8), [1.0] * 4, [2.0] * 4)
    >>> run.seconds  # (microbatches + stages - 1) * (forward + backward)
    33.0
    """
    seconds = {FORWARD: forward, BACKWARD: backward}
    last = len(orders) - 1
    jobs: list[Job] = []
    place: dict[tuple[str, int, int], int] = {}
    heads = [0] * len(orders)

    def needs(kind: str, stage: int, microbatch: int) -> tuple[str, int, int] | None:
        """The job whose result this one waits for."""
        if kind == FORWARD:
            return None if stage == 0 else (FORWARD, stage - 1, microbatch)
        return (FORWARD, stage, microbatch) if stage == last else (BACKWARD, stage + 1, microbatch)

    while any(head < len(order) for head, order in zip(heads, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            while heads[stage] < len(order):
                kind, microbatch = order[heads[stage]]
                need = needs(kind, stage, microbatch)
                if need is not None and need not in place:
                    break
                after = () if need is None else (_arrival(jobs, place, need, stage, hop),)
                jobs.append(Job(kind, stage, microbatch, ("stage", stage), seconds[kind][stage], after))
                place[kind, stage, microbatch] = len(jobs) - 1
                heads[stage] += 1
                moved = True
        if not moved:
            stuck = {s: order[heads[s]] for s, order in enumerate(orders) if heads[s] < len(order)}
            raise ProblemError(f"the pipeline's orders wait for each other: {stuck}.", "Order them topologically.")
    count = 1 + max((microbatch for order in orders for _, microbatch in order), default=-1)
    return PipelineRun(tuple(jobs), run(jobs), len(orders), count)


def _arrival(
    jobs: list[Job], place: Mapping[tuple[str, int, int], int], need: tuple[str, int, int], stage: int, hop: float
) -> int:
    """The event after which a neighbour's result is here; on the same stage that is its own job."""
    _, source, microbatch = need
    if source == stage or hop == 0.0:
        return place[need]
    link = ("link", 2 * min(source, stage) + (source > stage))
    jobs.append(Job("hop", source, microbatch, link, hop, (place[need],)))
    return len(jobs) - 1
