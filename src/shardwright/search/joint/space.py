"""All pipelines with one micro-batch size: the stages there can be, the best composition, and those of the recipes.

A stage is what lies between two cuts (a run of blocks, or of a general graph the difference of two ideals:
:mod:`~shardwright.search.joint.chain`, :mod:`~shardwright.search.joint.ideals`) on one of the priced sub-meshes with one of
the strategies priced there (:mod:`~shardwright.search.joint.blocks`, :mod:`~shardwright.search.joint.pieces`), and as many
of its blocks recompute as its memory asks for (:mod:`~shardwright.search.joint.recomputing`). What a run of blocks costs
depends on how many they are and whether it is the first or the last, not on where it lies, so it is priced once per such
kind.
Compositions are found exactly for a pipeline that is filled and drained once (:mod:`~shardwright.search.joint.compose`);
the step itself is that of 1F1B, event by event, and what is found is improved by it until no small change helps; from there
other orders of passes begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

import numpy as np

from shardwright.cluster import Cluster, Link, Node, meshes
from shardwright.errors import Infeasible
from shardwright.search.conditions import Conditions
from shardwright.search.joint._kernels import DOWN_AND_UP, ONE, ROUND
from shardwright.search.joint.blocks import BlockPricer
from shardwright.search.joint.chain import Chain
from shardwright.search.joint.compose import compose, no_schedule_below
from shardwright.search.joint.cuts import PricedCuts
from shardwright.search.joint.found import JointPlan, Model
from shardwright.search.joint.orders import least_held
from shardwright.search.joint.pieces import PiecePricer
from shardwright.search.joint.problem import Floats, PipelineProblem, StageTable, filled_and_drained, pack
from shardwright.search.joint.recomputing import Price, Recomputing, recomputed
from shardwright.search.joint.shares import prices_in_shares
from shardwright.search.joint.timed import Run, Timed

MOST_UNITS = 64
"""Devices are counted in units of so many that there are at most about so many of them."""
LITTLE_MORE = 1.25
"""Compositions are looked for whose slowest stage alone would take at most so many times a step that is known."""
CHANGES_OF_OTHERS = 2_000
"""So many stages, in all small changes, are timed in each order other than 1F1B."""


@dataclass(frozen=True)
class Row:
    """A price with where its devices may stand, in units of devices counted from the end of the line."""

    price: Price
    units: int
    low: int
    high: int
    room: float
    near: Link  # a device's part of the link within a node, and of that between nodes
    far: Link

    def hop(self, size: Floats, far: bool) -> Floats:
        """Seconds of one transfer (one way) of so many bytes."""
        link = self.far if far else self.near
        return np.where(size > 0, link.latency + size / self.price.devices / link.bandwidth, 0.0)

    def one_hop(self, size: float, far: bool) -> float:
        """The same for a single number of bytes."""
        link = self.far if far else self.near
        return link.latency + size / self.price.devices / link.bandwidth if size > 0 else 0.0

    @property
    def align(self) -> int:
        """Stages stand at multiples of their devices; one across the border of unlike nodes stands there."""
        return 1 if self.price.strategy.shares else self.units


class Space:
    """All pipelines with one micro-batch size."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        batch: int,
        size: int,
        conditions: Conditions,
        max_axes: int,
        most_stages: int,
        pricer: BlockPricer | PiecePricer | None = None,
    ) -> None:
        self.cluster, self.size, self.microbatches = cluster, size, batch // size
        self.pricer = pricer or BlockPricer(model.graph_at(size), optimizer=conditions.optimizer)
        if isinstance(self.pricer, BlockPricer):
            blocks = model.blocks or self.pricer.run.count
            self.cutting: PricedCuts = Chain(blocks, self.pricer.boundary_bytes)
        else:
            self.cutting = self.pricer.ideals
        self.cuts = self.cutting.count
        self.unit = max(1, 2 ** ceil(np.log2(cluster.size / MOST_UNITS)))
        self.devices = cluster.size // self.unit
        self.most = min(most_stages, self.devices, self.cuts - 1)
        self.rows = self._rows(conditions, max_axes)
        self._timed: dict[str, Timed] = {}
        self.first, self.last = np.nonzero(self.cutting.nested)
        self.far = np.array(
            [(k * self.unit) % self.cluster.nodes[0].devices == 0 for k in range(self.devices + 1)], dtype=bool
        )

    def within(self, memory_limit: float | None) -> Space:
        """The same with fewer bytes per device."""
        if memory_limit is None:
            return self
        return self._with([replace(row, room=min(row.room, memory_limit)) for row in self.rows])

    def corrected(self, bytes_of: Mapping[int, tuple[float, float]]) -> Space:
        """The same where blocks of some strategies (by their id) hold more per micro-batch, and save more or less by
        recomputing, than they were priced at."""
        return self._with(
            [
                replace(row, price=row.price.corrected(*bytes_of.get(id(row.price.strategy), (0.0, 0.0))))
                for row in self.rows
            ]
        )

    def _with(self, rows: list[Row]) -> Space:
        other = copy(self)
        other.rows, other._timed = rows, {}
        return other

    def timed(self, schedule: str = "1f1b") -> Timed:
        """Compositions of all rows timed in an order of passes; one for all who ask."""
        if schedule not in self._timed:
            self._timed[schedule] = Timed(self, self.rows, schedule)
        return self._timed[schedule]

    def _rows(self, conditions: Conditions, max_axes: int) -> list[Row]:
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
                    for mesh in meshes(part, max_axes):
                        room = conditions.room(mesh.device)
                        for price in self.pricer.prices(mesh, self.microbatches):
                            rows.append(Row(price, count // self.unit, low, high, room, inner, network))
                count *= 2
        if isinstance(self.pricer, BlockPricer):
            rows += self._across(self.pricer, conditions, max_axes)
        return rows

    def _across(self, pricer: BlockPricer, conditions: Conditions, max_axes: int) -> list[Row]:
        """Stages across a border of unlike nodes, with equally many devices on both sides."""
        rows, border = [], self.devices
        for before, behind in pairwise(self.cluster.groups()):
            border -= before.size // self.unit
            ends = before.nodes[-1], behind.nodes[0]
            inner, network = (link.per_device(ends[0].devices) for link in (ends[0].link, self.cluster.network))
            for count in (self.unit << k for k in range(self.cluster.size.bit_length())):
                if count > min(before.size, behind.size) or (
                    count > min(node.devices for node in ends) and ends[0].devices != ends[1].devices
                ):
                    break
                if count <= ends[0].devices:
                    nodes = tuple(replace(node, devices=count) for node in ends)
                elif count % ends[0].devices == 0:
                    each = count // ends[0].devices
                    nodes = (*before.nodes[-each:], *behind.nodes[:each])
                else:
                    continue
                units = count // self.unit
                for mesh in meshes(replace(self.cluster, nodes=nodes), max_axes):
                    room = conditions.room(mesh.device)
                    for price in prices_in_shares(pricer, mesh, self.microbatches, self.size):
                        rows.append(Row(price, 2 * units, border - units, border + units, room, inner, network))
        return rows

    def seconds(self, row: Row, kinds: np.ndarray, held: np.ndarray) -> Recomputing:
        """[kinds, held]: seconds of a micro-batch (infinite where it does not fit), and blocks that recompute."""
        again = self.recomputed(row, kinds, held)
        return again._replace(seconds=self.plain(row, kinds)[:, None] + again.seconds)

    def recomputed(self, row: Row, kinds: np.ndarray, held: np.ndarray) -> Recomputing:
        """The same less what nothing recomputes takes."""
        rest, flying = row.price.resting.of(*kinds), row.price.held.of(*kinds)
        over = rest[:, None] + flying[:, None] * held - row.room
        return recomputed(row.price, over, kinds, held)

    def plain(self, row: Row, kinds: np.ndarray) -> Floats:
        """Seconds of a micro-batch where nothing is recomputed and no border is crossed over a slow link."""
        received, sent = self.cutting.borders(kinds)
        return row.price.seconds.of(*kinds) + 2 * (row.hop(received, far=False) + row.hop(sent, far=False))

    def _kinds(self, v: bool) -> tuple[np.ndarray, np.ndarray]:
        """The unlike kinds of stages, and which of them every stage is. ``v``: of groups of devices that are gone through
        down and up again, so that the first has both ends of the model."""
        shapes = self.cutting.kinds(self.first, self.last, both_ends=v)
        kinds, kind_of = np.unique(shapes, axis=1, return_inverse=True)
        return kinds, kind_of.reshape(-1)

    def _tables(
        self, rows: Sequence[Row], *, for_bound: bool, closing_counts: float, v: bool, most: float
    ) -> list[StageTable]:
        """One table per size and place of a stage: the best row for every stage and number held, by seconds with
        closing; stages whose micro-batches alone take more than ``most`` seconds are left out. ``v``: of groups of devices
        whose first has both ends of the model.
        """
        tables, held = [], np.arange(1, self.most + 1)
        kinds, kind_of = self._kinds(v)
        borders = self.cutting.borders(self.cutting.kinds(self.first, self.last))
        for where in sorted({(row.units, row.low, row.high, row.align) for row in rows}):
            alike = [row for row in rows if (row.units, row.low, row.high, row.align) == where]
            plain = np.full((kinds.shape[1], self.most), np.inf)
            whole = plain.copy()
            for row in alike:
                seconds = self.seconds(row, kinds, held).seconds
                closing = closing_counts * row.price.closing.of(*kinds)[:, None]
                plain = np.minimum(plain, seconds)
                whole = np.minimum(whole, seconds + closing / self.microbatches)
            with np.errstate(invalid="ignore"):
                spread = np.where(np.isfinite(whole), (whole - plain) * self.microbatches, np.inf).min(axis=1)
            chosen = (plain if for_bound else whole)[kind_of]
            some = self.microbatches * chosen[:, 0] <= most if most < np.inf else np.isfinite(chosen[:, 0])
            far_in, far_out = (2 * (alike[0].hop(size, far=True) - alike[0].hop(size, far=False)) for size in borders)
            tables.append(
                StageTable(
                    self.first[some],
                    self.last[some],
                    where[0],
                    chosen[some],
                    chosen[some],
                    align=where[3],
                    low=where[1],
                    high=where[2],
                    closing=spread[kind_of][some] if for_bound else None,
                    far_in=far_in[some],
                    far_out=far_out[some],
                )
            )
        return tables

    def problem(
        self,
        rows: Sequence[Row],
        *,
        for_bound: bool = False,
        closing_counts: float = 1.0,
        v: bool = False,
        most: float = np.inf,
    ) -> PipelineProblem:
        tables = self._tables(rows, for_bound=for_bound, closing_counts=closing_counts, v=v, most=most)
        objective = filled_and_drained(self.microbatches)
        return PipelineProblem(f"pipelines of {self.size}", self.cuts, self.devices, pack(tables), objective, self.far)

    def bound(self, known: float = np.inf) -> float:
        """Seconds that no pipeline of this micro-batch size undercuts: one stage per group of devices in any order that
        holds what 1F1B does or more, or interleaved 1F1B and ZB-V. At most those of a pipeline that is ``known``, of this
        size or another, which makes it faster to find."""
        problems = [(self.problem(self.rows, for_bound=True, most=known), "1f1b", ONE)]
        if self.cutting.halves:
            v = self.problem(self.rows, for_bound=True, v=True, most=known)
            problems += [(problems[0][0], "interleaved-1f1b", ROUND), (v, "zb-v", DOWN_AND_UP)]
        least = known
        for problem, order, groups in problems:
            needed = np.array(least_held(order, self.most, self.microbatches))
            least = no_schedule_below(problem, self.microbatches, self.most, least, needed=needed, groups=groups)
        return least

    def composed(self, rows: Sequence[Row] | None = None, known: float = np.inf) -> list[list[Run]]:
        """Compositions of these rows that are best where a pipeline is filled and drained once; none where none fits, or
        none takes little more than the step of one that is ``known``."""
        rows, found = self.rows if rows is None else rows, []
        # Closing seconds of later stages run beside the draining of earlier ones: with them and without.
        for closing_counts in (1.0, 0.0) if rows else ():
            problem = self.problem(rows, closing_counts=closing_counts, most=LITTLE_MORE * known)
            try:
                pipeline = compose(problem, bounded=False).answer
            except Infeasible:
                return []
            found.append([Run(stage.start, stage.end, stage.devices) for stage in pipeline])
        return found

    def seconds_of(self, runs: Sequence[Run]) -> float:
        """The step of a composition in 1F1B; infinite where it does not fit."""
        found = self.timed().timed(runs)
        return np.inf if found is None else found[0]

    def even(self, schedule: str = "1f1b") -> float:
        """The step of the fastest pipeline whose groups have as many devices and as much to do; infinite where none fits."""
        timed = self.timed(schedule)
        found = None if (runs := timed.fastest_of_even()) is None else timed.timed(runs)
        return np.inf if found is None else found[0]

    def improved(self, starts: Sequence[Sequence[Run]]) -> JointPlan | None:
        """The fastest pipeline that is found from compositions; nothing where none fits."""
        timed = self.timed()
        further = [timed.fastest_of_even(), timed.fastest_of_few()] if starts else []
        plans = [timed.improved(runs) for runs in (*starts, *filter(None, further))]
        return min(filter(None, plans), key=lambda plan: plan.step_seconds, default=None)

    def best(self, rows: Sequence[Row]) -> JointPlan | None:
        """The best composition of these rows as it is; nothing where none fits."""
        plans = [Timed(self, rows).plan(runs) for runs in self.composed(rows)]
        return min(filter(None, plans), key=lambda plan: plan.step_seconds, default=None)

    def ordered(self, schedule: str, starts: Sequence[JointPlan]) -> JointPlan | None:
        """The fastest pipeline in another order than 1F1B that is found from others; nothing where none fits."""
        timed = self.timed(schedule)
        few = timed.fastest_of_few()
        runs = [few] if few is not None else [timed.fastest_of_even(), *(self.runs(plan) for plan in starts)]
        plans = [timed.improved(one, CHANGES_OF_OTHERS) for one in filter(None, runs)]
        return min(filter(None, plans), key=lambda plan: plan.step_seconds, default=None)

    def runs(self, plan: JointPlan) -> list[Run]:
        """The composition of a plan with one stage per group of devices."""
        cuts = [self.cutting.cut_at(stage.first_block) for stage in plan.stages] + [self.cuts - 1]
        devices = (stage.devices // self.unit for stage in plan.stages)
        return [Run(*ends, units) for ends, units in zip(pairwise(cuts), devices, strict=True)]
