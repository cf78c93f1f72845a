"""What else a configuration could say: every single change of it, each with the step and the memory it would lead to.

A change moves a factor from one degree to another, divides more or less among the ranks, recomputes more or less, or takes
the batch in more or fewer passes; devices, rows and numbers stay as they are. Deep models are judged by two short ones, as
the planner does at a glance (:mod:`shardwright.planner.glance`): every further block adds the same. Taken one after the
other, the change that saves most first, they lead to the configuration nearest to the given one that no single change
makes faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from shardwright.cluster import Cluster, part_of
from shardwright.errors import ShardwrightError
from shardwright.exchange.configuration import (
    BLOCKS,
    DEGREES,
    GRADIENTS,
    LIGHT,
    NOTHING,
    OPTIMIZER,
    PARAMETERS,
    Configuration,
    ConfigurationError,
    Remark,
)
from shardwright.exchange.planning import mesh_and_roles, plan_like
from shardwright.graph import Graph
from shardwright.graph.shorten import longest_run, shortened
from shardwright.planner import Options, Progress
from shardwright.planner.glance import FEW

KEEPABLE = (*DEGREES, "pipeline", "sequence", "sharding", "schedule", "recompute", "microbatches")
"""What a person may want to stay as it is."""

GAIN = 0.01
"""A change that saves a smaller share of the step is not worth a change."""

MAX_AXES = 3
"""Changes that need meshes of more axes are left out: prices between all layouts take 20 to 100 s there."""

MAX_CHANGES = 12
"""So many changes one after the other are as good as a configuration of one's own."""


@dataclass(frozen=True)
class Judged:
    """A configuration with its predicted step and peak; ``exact``: of the whole model, event by event."""

    what: str
    configuration: Configuration
    seconds: float = inf
    bytes: float = inf
    limit: float = 0.0
    refusal: str = ""

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit

    @property
    def rank(self) -> tuple[bool, float]:
        """Less is better: what fits by its seconds, what does not by its bytes."""
        return not self.fits, self.seconds if self.fits else self.bytes


def check_kept(keep: Sequence[str]) -> None:
    """Refuse to keep what is no decision."""
    for name in keep:
        if name not in KEEPABLE:
            raise ConfigurationError(f"There is nothing called {name!r} to keep.", f"Known: {', '.join(KEEPABLE)}.")


def single_changes(c: Configuration, keep: Sequence[str] = ()) -> Iterator[tuple[str, Configuration]]:
    """Every single change of a settled configuration, in words, and what it leads to.

    >>> c = Configuration("torchtitan", shard=2, microbatch=1, microbatches=1, batch=2)
    >>> [what for what, _ in single_changes(c, keep=("pipeline", "context", "tensor", "replicate", "microbatches"))]
    ['recompute light', 'recompute blocks', 'divide optimizer state alone', 'divide gradients and optimizer state alone']
    """
    free = [name for name in (*DEGREES, "pipeline") if name not in keep]
    if "recompute" not in keep:
        for way in (NOTHING, LIGHT, BLOCKS):
            if (c.recompute, c.recomputed_share) != (way, 1.0) and c.recompute != way:
                yield f"recompute {way}", replace(c, recompute=way, recomputed_share=1.0)
    if "sharding" not in keep and (c.shard or 1) > 1:
        ways = [(OPTIMIZER, "optimizer state alone"), (GRADIENTS, "gradients and optimizer state alone")]
        for way, what in [*ways, (PARAMETERS, "parameters, gradients and optimizer state")]:
            reshard = way == PARAMETERS
            if (c.sharding, c.reshard) != (way, reshard):
                yield f"divide {what}", replace(c, sharding=way, reshard=reshard)
    if "sequence" not in keep and (c.tensor or 1) > 1:
        what = "norms on every tensor rank alike" if c.sequence else "cut norms along the sequence"
        yield what, replace(c, sequence=not c.sequence)
    for giver in free:
        had = getattr(c, giver) or 1
        factor = next((p for p in (2, 3, 5, 7) if had % p == 0), had)
        for taker in free if had > 1 else ():
            if taker != giver:
                grown = (getattr(c, taker) or 1) * factor
                what = f"{taker} {grown}, {giver} {had // factor}"
                degrees: dict[str, Any] = {giver: had // factor, taker: grown}
                moved = _passes(replace(c, **degrees, cuts=()))
                if moved is not None:
                    yield what, moved
    if "microbatches" not in keep:
        count, rows = c.microbatches or 1, c.microbatch or 1
        if rows % 2 == 0:
            yield f"{2 * count} micro-batches", replace(c, microbatches=2 * count, microbatch=rows // 2)
        if count % 2 == 0 and count // 2 >= c.pipeline:
            yield f"{count // 2} micro-batches", replace(c, microbatches=count // 2, microbatch=2 * rows)
    if "schedule" not in keep and c.pipeline > 1 and c.stages_per_device == 1:
        for name in ("gpipe", "1f1b", "zb-h1"):
            if name != c.schedule:
                yield f"schedule {name}", replace(c, schedule=name)


def _passes(c: Configuration) -> Configuration | None:
    """The same rows in whole micro-batches, at least two for every group of ranks of a pipeline."""
    c = replace(c, sequence=c.sequence and c.tensor != 1)
    if c.pipeline == 1:
        c = replace(c, schedule="1f1b", stages_per_device=1)
    batch, count = c.batch or 1, max(c.microbatches or 1, 2 * c.pipeline if c.pipeline > 1 else 1)
    if batch % c.data:
        return None
    rows = batch // c.data
    count = next((n for n in range(min(count, rows), 0, -1) if rows % n == 0), 1)
    if count < c.pipeline:
        return None
    return replace(c, microbatches=count, microbatch=rows // count)


def judge(graph: Graph, cluster: Cluster, c: Configuration, options: Options | None = None, what: str = "") -> Judged:
    """What a configuration would lead to; deep models by two short ones.

    >>> judge(graph, parse_cluster("8xH100"), Configuration("torchtitan", shard=8)).bytes      # doctest: +SKIP
    """
    options = options or Options()
    limit = options.room(cluster.device)
    run = longest_run(graph)
    few = c.stages * ceil(FEW / c.stages)
    short = [shortened(graph, n) for n in (few, 2 * few)] if run is not None and run.count > 2 * few else [None]
    try:
        if None in short:
            told = [plan_like(graph, cluster, c, options).plan.prediction]
        else:
            plain = replace(c, cuts=())
            told = [plan_like(part, cluster, plain, options).plan.prediction for part in short if part is not None]
    except ShardwrightError as error:
        return Judged(what, c, limit=limit, refusal=error.message)
    seconds, held = told[-1].step_seconds, told[-1].memory_bytes
    if len(told) == 2 and run is not None:
        further = run.count / few - 2
        seconds += further * (seconds - told[0].step_seconds)
        held += further * (held - told[0].memory_bytes)
    return Judged(what, c, seconds, held, limit)


def judged_changes(
    graph: Graph,
    cluster: Cluster,
    c: Configuration,
    options: Options | None = None,
    *,
    keep: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[Judged]:
    """Every single change with what it leads to, the best first.

    >>> judged_changes(graph, cluster, configuration)[0].what                                   # doctest: +SKIP
    'recompute light'
    """
    found = []
    for what, changed in single_changes(c, keep):
        if _axes(cluster, changed) > MAX_AXES:
            continue
        if progress is not None:
            progress(f"trying: {what}")
        found.append(judge(graph, cluster, changed, options, what))
    return sorted((one for one in found if not one.refusal), key=lambda one: one.rank)


def _axes(cluster: Cluster, c: Configuration) -> int:
    """How many axes the mesh of a stage has; as many as there may be where the degrees make none."""
    try:
        return len(mesh_and_roles(part_of(cluster, range(cluster.size // c.pipeline)), c)[1])
    except ShardwrightError:
        return MAX_AXES


def improve(
    graph: Graph,
    cluster: Cluster,
    c: Configuration,
    options: Options | None = None,
    *,
    keep: Sequence[str] = (),
    progress: Progress | None = None,
) -> tuple[Configuration, tuple[Remark, ...]]:
    """The configuration to which changes that pay lead, and each of them with the step before and after.

    >>> improve(graph, cluster, configuration, keep=("tensor", "pipeline"))[1]                   # doctest: +SKIP
    """
    check_kept(keep)
    best, made = judge(graph, cluster, c, options), list[Remark]()
    while len(made) < MAX_CHANGES:
        found = judged_changes(graph, cluster, best.configuration, options, keep=keep, progress=progress)
        if not found or not found[0].rank < best.rank:
            break
        first = found[0]
        if first.fits and best.fits and first.seconds > (1 - GAIN) * best.seconds:
            break
        before = f"{best.seconds:.4g} s" + ("" if best.fits else f", {best.bytes / 1e9:.1f} GB: does not fit")
        made.append(Remark(first.what, f"{first.seconds:.4g} s a step", f"{before} before"))
        best = first
    return best.configuration, tuple(made)
