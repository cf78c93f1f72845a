"""Pipelines of our own priced blocks: cuts, devices and mesh per stage, strategy, micro-batch size, recomputing,
together.

Per micro-batch size every sub-mesh's strategies are priced once (:mod:`~shardwright.search.joint.blocks`); a stage is
a run of blocks (the first with what comes before them, the last with what comes after) on one of the meshes with one
of the strategies, and as many of its blocks recompute as its memory asks for. Stages stand in a line of devices, none
across the border of unlike nodes; transfers between stages cost more where that border is between nodes. The best
composition is found exactly and timed as 1F1B by event simulation.

The bound is on the step, over this space at these prices: no schedule of any of its pipelines is faster than its
busiest stage's micro-batches and closing, after filling and before draining the stages before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from shardwright.cluster import Cluster, Mesh, Node, meshes
from shardwright.errors import Infeasible, ProblemError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.schedules import gpipe, one_f_one_b, pipeline, run
from shardwright.search.joint.blocks import BlockPrice, BlockPricer
from shardwright.search.joint.compose import compose, no_schedule_below
from shardwright.search.joint.problem import Floats, PipelineProblem, StageTable, filled_and_drained, pack

MOST_UNITS = 64
"""Cuts and devices are counted in units of so many blocks and devices that there are at most about so many of them."""

BASELINES = ("megatron-3d", "gpipe", "pipedream", "alpa")


@dataclass(frozen=True)
class JointStage:
    """Blocks ``first_block``..``last_block`` (exclusive) on ``devices`` devices from ``first_device`` on."""

    first_block: int
    last_block: int
    first_device: int
    mesh: Mesh
    strategy_name: str
    strategy: Strategy
    recomputed_blocks: int
    holds: int
    seconds: float
    closing_seconds: float
    memory_bytes: float

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
    scope: str
    boundary_bytes: float = 0.0
    """What a device sends to other stages in one step, at most."""

    @property
    def gap(self) -> float:
        return 1.0 - self.bound_seconds / self.step_seconds


@dataclass(frozen=True)
class Model:
    """Where the graph of one micro-batch comes from, and how many blocks the whole model has (more than the graph may
    have).
    """

    graph_at: Callable[[int], Graph]
    blocks: int | None = None


def search_pipelines(
    model: Model,
    cluster: Cluster,
    *,
    batch: int,
    microbatch_sizes: Sequence[int],
    memory_limit: float | None = None,
    baselines: Sequence[str] = (),
    optimizer: str = "adamw",
    max_axes: int = 2,
    most_stages: int = 64,
) -> tuple[JointPlan, dict[str, JointPlan | str]]:
    """The fastest pipeline, and each baseline's (or why it has none), all by the same prices.

    Parameters
    ----------
    batch
        Samples per step; every micro-batch size must divide it.

    Examples
    --------
    >>> model = Model(lambda size: capture(*zoo_model(batch=size)))  # doctest: +SKIP
    >>> cluster = parse_cluster("8xH100")  # doctest: +SKIP
    >>> best, _ = search_pipelines(model, cluster, batch=64, microbatch_sizes=(1, 2))  # doctest: +SKIP
    """
    started = time.perf_counter()
    space = Pipelines(
        model,
        cluster,
        batch=batch,
        microbatch_sizes=microbatch_sizes,
        memory_limit=memory_limit,
        optimizer=optimizer,
        max_axes=max_axes,
        most_stages=most_stages,
    )
    best, found = space.compared(baselines)
    return replace(best, search_seconds=time.perf_counter() - started), found


class Pipelines:
    """All pipelines of a model on a cluster, its blocks priced once for whatever is asked then."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        *,
        batch: int,
        microbatch_sizes: Sequence[int],
        memory_limit: float | None = None,
        optimizer: str = "adamw",
        max_axes: int = 2,
        most_stages: int = 64,
    ) -> None:
        for size in microbatch_sizes:
            if batch % size:
                raise ProblemError(f"micro-batches of {size} do not divide a batch of {batch}.", "Choose a divisor.")
        self.cluster = cluster
        self.spaces = [
            _Space(model, cluster, batch, size, memory_limit, optimizer, max_axes, most_stages)
            for size in microbatch_sizes
        ]

    def best(self, memory_limit: float | None = None) -> JointPlan:
        """The fastest, within fewer bytes per device where that is asked.

        Raises
        ------
        Infeasible
            When none fits.
        """
        spaces = [space.within(memory_limit) for space in self.spaces]
        limits = [space.bound() for space in spaces]
        best: JointPlan | None = None
        for space, bound in sorted(zip(spaces, limits, strict=True), key=lambda pair: pair[1]):
            if best is None or bound < best.step_seconds:
                best = _faster(best, space.best())
        if best is None:
            raise Infeasible(
                f"no pipeline of this model fits {self.cluster.name}.",
                "Give it more devices, or smaller micro-batches.",
            )
        return replace(best, bound_seconds=min(*limits, best.step_seconds))

    def compared(self, baselines: Sequence[str]) -> tuple[JointPlan, dict[str, JointPlan | str]]:
        """The fastest, and each baseline's (or why it has none): a baseline that is faster is the answer itself."""
        best = self.best()
        found: dict[str, JointPlan | str] = {}
        for name in baselines:
            plans = [plan for space in self.spaces if (plan := space.baseline(name)) is not None]
            found[name] = min(plans, key=lambda p: p.step_seconds) if plans else "nothing of this kind fits"
            faster = _faster(best, found[name])
            assert faster is not None
            best = replace(faster, bound_seconds=min(best.bound_seconds, faster.step_seconds))
        return best, found


def _faster(one: JointPlan | None, other: JointPlan | str | None) -> JointPlan | None:
    if not isinstance(other, JointPlan):
        return one
    return other if one is None or other.step_seconds < one.step_seconds else one


@dataclass(frozen=True)
class _Row:
    """A price with where its devices may stand, in units of devices counted from the end of the line."""

    price: BlockPrice
    units: int
    low: int
    high: int
    room: float
    near: float  # seconds of one transfer (one way) over the link within a node, and between nodes
    far: float


class _Space:
    """All pipelines with one micro-batch size."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        batch: int,
        size: int,
        memory_limit: float | None,
        optimizer: str,
        max_axes: int,
        most_stages: int,
    ) -> None:
        self.cluster, self.size, self.microbatches = cluster, size, batch // size
        self.pricer = BlockPricer(model.graph_at(size), optimizer=optimizer)
        self.blocks = model.blocks or self.pricer.run.count
        self.grain = ceil(self.blocks / (2 * MOST_UNITS))
        self.cuts = ceil(self.blocks / self.grain) + 1
        self.unit = max(1, 2 ** ceil(np.log2(cluster.size / MOST_UNITS)))
        self.devices = cluster.size // self.unit
        self.most = min(most_stages, self.devices, self.cuts - 1)
        self.rows = self._rows(memory_limit, max_axes)
        first, last = np.triu_indices(self.cuts, 1)
        self.first, self.last = first, last
        self.starts = np.minimum(first * self.grain, self.blocks)
        self.ends = np.minimum(last * self.grain, self.blocks)
        self.far = np.array(
            [(k * self.unit) % self.cluster.nodes[0].devices == 0 for k in range(self.devices + 1)], dtype=bool
        )

    def within(self, memory_limit: float | None) -> _Space:
        """The same with fewer bytes per device."""
        if memory_limit is None:
            return self
        narrower = copy(self)
        narrower.rows = [replace(row, room=min(row.room, memory_limit)) for row in self.rows]
        return narrower

    def _rows(self, memory_limit: float | None, max_axes: int) -> list[_Row]:
        rows, after = [], self.devices
        for group in self.cluster.groups():
            node, total = group.nodes[0], group.size // self.unit
            low, high = after - total, after
            after = low
            count = self.unit
            while count <= group.size:
                if count <= node.devices:
                    nodes: tuple[Node, ...] = (replace(node, devices=count),)
                else:
                    nodes = group.nodes[: count // node.devices]
                part = replace(group, nodes=nodes)
                if part.size == count:
                    inner, network = node.link.per_device(node.devices), group.network.per_device(node.devices)
                    share = self.pricer.boundary_bytes / count
                    for mesh in meshes(part, max_axes):
                        for price in self.pricer.prices(mesh, self.microbatches):
                            rows.append(
                                _Row(
                                    price,
                                    count // self.unit,
                                    low,
                                    high,
                                    min(mesh.device.usable_memory, memory_limit or np.inf),
                                    inner.latency + share / inner.bandwidth,
                                    network.latency + share / network.bandwidth,
                                )
                            )
                count *= 2
        return rows

    def seconds(self, row: _Row, most: int) -> tuple[Floats, Floats]:
        """[stages, held]: seconds of a micro-batch (infinite where it does not fit), and blocks that recompute."""
        price = row.price
        count, first, last = self.ends - self.starts, self.starts == 0, self.ends == self.blocks
        hops = 2 * row.near * ((~first).astype(float) + ~last)
        base = price.seconds.of(count, first, last) + hops
        held = np.arange(1, most + 1)
        rest, flying = price.resting.of(count, first, last), price.held.of(count, first, last)
        over = rest[:, None] + flying[:, None] * held - row.room
        saves = price.recompute_saves * held
        # One block's activations are there in full while it is computed again.
        needed = np.ceil((over + price.held.block) / np.maximum(saves, 1e-9))
        again = np.where(over <= 0, 0.0, needed)
        fits = (over <= 0) | ((again <= count[:, None]) & (price.recompute_saves > 0))
        seconds = np.where(fits, base[:, None] + again * price.recompute_seconds, np.inf)
        return seconds, np.where(fits, again, 0.0)

    def _tables(self, rows: Sequence[_Row], *, for_bound: bool) -> list[StageTable]:
        """One table per size and place of a stage: the best row for every stage and number held, by seconds with
        closing.
        """
        tables = []
        for where in sorted({(row.units, row.low, row.high) for row in rows}):
            alike = [row for row in rows if (row.units, row.low, row.high) == where]
            plain = np.full((len(self.first), self.most), np.inf)
            whole = plain.copy()
            for row in alike:
                seconds, _ = self.seconds(row, self.most)
                closing = self.closing(row)[:, None]
                plain = np.minimum(plain, seconds)
                whole = np.minimum(whole, seconds + closing / self.microbatches)
            with np.errstate(invalid="ignore"):
                spread = np.where(np.isfinite(whole), (whole - plain) * self.microbatches, np.inf)
            chosen = plain if for_bound else whole
            some = np.isfinite(chosen[:, 0])
            extra = np.full(len(self.first), 2 * (alike[0].far - alike[0].near))
            tables.append(
                StageTable(
                    self.first[some],
                    self.last[some],
                    where[0],
                    chosen[some],
                    chosen[some],
                    align=where[0],
                    low=where[1],
                    high=where[2],
                    closing=np.where(np.isfinite(spread), spread, np.inf).min(axis=1)[some] if for_bound else None,
                    far_in=(extra * (self.first > 0))[some],
                    far_out=(extra * (self.last < self.cuts - 1))[some],
                )
            )
        return tables

    def closing(self, row: _Row) -> Floats:
        return row.price.closing.of(self.ends - self.starts, self.starts == 0, self.ends == self.blocks)

    def problem(self, rows: Sequence[_Row], *, for_bound: bool = False) -> PipelineProblem:
        tables = self._tables(rows, for_bound=for_bound)
        objective = filled_and_drained(self.microbatches)
        return PipelineProblem(f"pipelines of {self.size}", self.cuts, self.devices, pack(tables), objective, self.far)

    def bound(self) -> float:
        """Seconds that no pipeline of this micro-batch size undercuts."""
        return no_schedule_below(self.problem(self.rows, for_bound=True), self.microbatches)

    def best(self, rows: Sequence[_Row] | None = None) -> JointPlan | None:
        rows = self.rows if rows is None else rows
        if not rows:
            return None
        try:
            found = compose(self.problem(rows), bounded=False)
        except Infeasible:
            return None
        picked = []
        for stage in found.answer:
            index = int(np.nonzero((self.first == stage.start) & (self.last == stage.end))[0][0])
            after = self.devices - stage.first_device - stage.devices - (self.devices - _used(found.answer))
            picked.append((index, stage.devices, after, stage.holds))
        return self._timed(picked, rows, "1f1b")

    def _timed(self, picked: list[tuple[int, int, int, int]], rows: Sequence[_Row], schedule: str) -> JointPlan | None:
        """The stages with their best rows, timed by event simulation."""
        stages = []
        used = sum(units for _, units, _, _ in picked)
        for index, units, after, held in picked:
            options = []
            for row in rows:
                if row.units == units and row.low <= after and after + units <= row.high:
                    seconds, again = self.seconds(row, held)
                    if np.isfinite(seconds[index, -1]):
                        more = 2 * (row.far - row.near)
                        border = more * ((self.first[index] > 0) * self.far[after + units])
                        border += more * ((self.last[index] < self.cuts - 1) * self.far[after])
                        closing = float(self.closing(row)[index])
                        total = float(seconds[index, -1] + border)
                        options.append(
                            (total + closing / self.microbatches, total, closing, int(again[index, -1]), row)
                        )
            if not options:
                return None
            _, seconds_, closing, again_, row = min(options, key=lambda option: option[0])
            count = int(self.ends[index] - self.starts[index])
            at_ends = np.array(self.starts[index] == 0), np.array(self.ends[index] == self.blocks)
            flying = float(row.price.held.of(np.array(count), *at_ends)) - again_ * row.price.recompute_saves
            resting = float(row.price.resting.of(np.array(count), *at_ends))
            stages.append(
                JointStage(
                    first_block=int(self.starts[index]),
                    last_block=int(self.ends[index]),
                    first_device=(used - after - units) * self.unit,
                    mesh=row.price.mesh,
                    strategy_name=row.price.name,
                    strategy=row.price.strategy,
                    recomputed_blocks=again_,
                    holds=held,
                    seconds=seconds_,
                    closing_seconds=closing,
                    memory_bytes=resting + flying * held + (row.price.held.block if again_ else 0.0),
                )
            )
        times = [stage.seconds for stage in stages]
        make = gpipe if schedule == "gpipe" else one_f_one_b
        # Forward is about a third of a training step's work; transfers are part of the stages' seconds.
        chain = pipeline(
            range(len(stages)),
            self.microbatches,
            forward=[t / 3 for t in times],
            inputs=[2 * t / 3 for t in times],
            weights=0.0,
        )
        timing = run(make(len(stages), self.microbatches), chain)
        ends = [float(end[-1]) + stage.closing_seconds for end, stage in zip(timing.ends, stages, strict=True)]
        return JointPlan(
            tuple(stages), self.size, self.microbatches, schedule, max(ends), 0.0, 0.0,
            f"pipelines with micro-batches of {self.size} or another size that was tried: contiguous runs of blocks on "
            "sub-meshes of powers of two, splits as priced per mesh, seconds summed, any schedule",
            2 * 2 * self.microbatches * self.pricer.boundary_bytes / min(stage.devices for stage in stages)
            * (len(stages) > 1),
        )  # fmt: skip

    def baseline(self, name: str) -> JointPlan | None:
        """The best plan of a restriction of the same space."""
        if name == "pipedream":
            alone = [row for row in self.rows if row.price.name == "data-parallel" or row.price.devices == 1]
            return self.best([replace(row, price=row.price.without_recomputing()) for row in alone])
        if name == "alpa":
            fastest = [row for row in self.rows if row.price.name == "auto" and row.price.fastest]
            plain = [replace(row, price=row.price.without_recomputing()) for row in fastest]
            return self.best(plain + [replace(row, price=row.price.recomputing_everything()) for row in fastest])
        if name not in BASELINES:
            raise ProblemError(f"there is no pipeline baseline {name!r}.", f"Known: {', '.join(BASELINES)}.")
        plans = []
        for count in range(1, self.most + 1):
            if self.devices % count:
                continue
            units = self.devices // count
            cuts = _even_cuts(self.cuts - 1, count)
            picked = []
            for k in range(count):
                where = (self.first == cuts[k]) & (self.last == cuts[k + 1])
                held = self.microbatches if name == "gpipe" and count > 1 else count - k
                picked.append((int(np.nonzero(where)[0][0]), units, (count - 1 - k) * units, held))
            for mesh in {row.price.mesh: None for row in self.rows if row.units == units}:
                for kind in ("megatron", "data-parallel", "fsdp", "auto"):
                    alike = [
                        row for row in self.rows if (row.units, row.price.mesh, row.price.name) == (units, mesh, kind)
                    ]
                    if alike:
                        plans.append(self._timed(picked, alike, "gpipe" if name == "gpipe" else "1f1b"))
        fitting = [plan for plan in plans if plan is not None]
        return min(fitting, key=lambda plan: plan.step_seconds, default=None)


def _even_cuts(blocks: int, stages: int) -> list[int]:
    """Equal runs of blocks; what does not divide goes to the stages in the middle, for the first and last have more to do.

    >>> _even_cuts(7, 3)
    [0, 2, 5, 7]
    """
    counts = [blocks // stages] * stages
    middle = sorted(range(stages), key=lambda k: (k in (0, stages - 1), k))
    for k in middle[: blocks % stages]:
        counts[k] += 1
    return [sum(counts[:k]) for k in range(stages + 1)]


def _used(stages: Sequence[object]) -> int:
    return sum(stage.devices for stage in stages)  # type: ignore[attr-defined] # placed stages
