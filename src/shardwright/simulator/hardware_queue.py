"""What a plan's step would take if devices had work queues in hardware that hand rows over by themselves.

The hardware assistants of "Model parallelism with compiler and hardware support" (2019; its abstract alone is known to us,
the design is ours), for which no device exists: a simulation. A row of the batch is a piece of work: all that one row costs
to compute, forward and backward. Ranks that cut the batch among them are the workers; each begins with its rows in its
queue, and one that runs dry asks another for a waiting row over their link and waits for its inputs
(:mod:`~shardwright.simulator.work_queues`). What a step sends and updates stays as it is, after a barrier. Beside it stand
equal shares, and rows that software shares anew between steps by the speeds it saw. All see the same speeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.program import COMPUTE
from shardwright.search.labels import label_loops
from shardwright.simulator.timeline import Timeline, simulate_plan
from shardwright.simulator.work_queues import Queues, Software, Step, noisy_speeds, run_job

STEPS, SEEDS = 20, 2
ASK = 2
"""Messages before a row is on its way: the question and its answer."""
SCENES = (
    ("10 %, within a step", 1.0, 0.1, 0.1),
    ("30 %, within a step", 1.0, 0.3, 0.1),
    ("30 %, for one step", 1.0, 0.3, 1.0),
    ("30 %, for ten steps", 1.0, 0.3, 10.0),
    ("one at half speed", 0.5, 0.0, 10.0),
    ("one at half speed, and 30 %", 0.5, 0.3, 0.1),
)
"""Name, speed of one worker, spread of all speeds, and for how many steps a speed lasts."""


@dataclass(frozen=True)
class Work:
    """A plan's step as rows: how many ``workers`` share them, seconds to compute one, what stays outside the queues, and how
    long a row takes to be asked for and to arrive."""

    workers: int
    rows: int
    row_seconds: float
    fixed_seconds: float
    latency: float
    travel: float


@dataclass(frozen=True)
class Scene:
    """Mean seconds of a step where devices' speeds vary in one way; ``possible``: were work divisible and free to move."""

    name: str
    equal: float
    software: float
    queues: float
    both: float
    possible: float


def work_of(plan: Plan, graph: Graph, timeline: Timeline | None = None) -> Work:
    """The rows of a plan's step.

    Raises
    ------
    ShardwrightError
        When the plan has stages, or no axis of its mesh cuts the batch.
    """
    if len(plan.stages) > 1:
        raise ShardwrightError("Queues of rows are about plans on one mesh.", "Plan with --stages none.")
    strategy, mesh = plan.stages[0].strategy, plan.meshes[0]
    given = [graph.tensors[i.tensor] for i in graph.inputs if i.tensor is not None and graph.tensors[i.tensor].shape]
    cut = [number for number, axis in enumerate(mesh.axes) if axis.size > 1 and _cuts_rows(strategy, graph, number)]
    if not cut:
        raise ShardwrightError(
            "No axis of this plan's mesh cuts the batch, so there are no rows to hand over.", "Plan with --search fsdp."
        )
    batch = max(tensor.shape[0] for tensor in given)
    (rank, *_) = (timeline or simulate_plan(plan, graph)).ranks
    workers = prod(mesh.axes[number].size for number in cut)
    link = max((mesh.axes[number] for number in cut), key=lambda axis: axis.latency)
    row_bytes = sum(tensor.bytes for tensor in given) / batch
    computing = rank.load[COMPUTE]
    return Work(
        workers,
        batch,
        computing / (batch / workers),
        max(rank.seconds - computing, 0.0),
        ASK * link.latency,
        row_bytes / link.bandwidth,
    )


def _cuts_rows(strategy: Strategy, graph: Graph, axis: int) -> bool:
    """Whether an axis of the mesh cuts the batch in most of the floating-point operations."""
    rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
    labels = label_loops(graph, rules)
    cut = [op for op in graph.ops if labels.get(op.name, {}).get(strategy.splits[op.name][axis] or "") == "batch"]
    return 2 * sum(rules[op.name].flops for op in cut) > sum(one.flops for one in rules.values())


def scenes(work: Work, latency: float | None = None) -> list[Scene]:
    """Every scene with equal shares, software that shares anew, queues, and both; ``latency``: seconds to be answered.

    >>> one = scenes(Work(2, 8, 1.0, 0.5, 0.0, 0.0))[4]  # one of two workers at half speed
    >>> one.equal, one.queues
    (8.5, 6.5)
    """
    asked = work.latency if latency is None else latency
    queues = Queues(asked / work.row_seconds, work.travel / work.row_seconds)  # in seconds of a row, as all below
    return [_scene(work, queues, *scene) for scene in SCENES]


def _scene(work: Work, queues: Queues, name: str, slow: float, noise: float, lasting: float) -> Scene:
    step = work.rows / work.workers
    base = [slow, *[1.0] * (work.workers - 1)]
    ways: dict[str, tuple[Software | None, Queues | None]] = {
        "equal": (None, None),
        "software": (Software(), None),
        "queues": (None, queues),
        "both": (Software(), queues),
    }
    seconds, possible = dict.fromkeys(ways, 0.0), 0.0
    seeds = range(SEEDS if noise else 1)
    for seed in seeds:
        speeds = noisy_speeds(base, noise, lasting * step, 4.0 * STEPS * step / slow, seed)
        jobs = {
            way: run_job(speeds, work.rows, STEPS, software, hardware, 1000 * seed)
            for way, (software, hardware) in ways.items()
        }
        for way, steps in jobs.items():
            seconds[way] += _mean(steps)
        at_best = [[speeds.possible(one.start, work.rows) - one.start for one in steps] for steps in jobs.values()]
        possible += min(
            sum(steps) / STEPS for steps in at_best
        )  # every way meets other speeds, being elsewhere in time
    told = {way: total / len(seeds) * work.row_seconds + work.fixed_seconds for way, total in seconds.items()}
    return Scene(name, **told, possible=possible / len(seeds) * work.row_seconds + work.fixed_seconds)


def _mean(steps: Sequence[Step]) -> float:
    return sum(step.seconds for step in steps) / len(steps)
