"""All pipelines with one micro-batch size: the stages there can be, the best composition, and those of the recipes.

A stage is a run of blocks on one of the priced sub-meshes with one of the strategies priced there
(:mod:`~shardwright.search.joint.blocks`), and as many of its blocks recompute as its memory asks for
(:mod:`~shardwright.search.joint.recomputing`). What it costs depends on how many blocks it has and whether it is the first
or the last, not on where it lies, so it is priced once per such kind.
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

from shardwright.cluster import Cluster, Node, meshes
from shardwright.errors import Infeasible
from shardwright.search.joint._kernels import DOWN_AND_UP, ONE, ROUND
from shardwright.search.joint.blocks import BlockPrice, BlockPricer
from shardwright.search.joint.compose import compose, no_schedule_below
from shardwright.search.joint.found import JointPlan, Model
from shardwright.search.joint.orders import least_held
from shardwright.search.joint.problem import PipelineProblem, StageTable, filled_and_drained, pack
from shardwright.search.joint.recomputing import Recomputing, recomputing
from shardwright.search.joint.shares import prices_in_shares
from shardwright.search.joint.timed import Run, Timed

MOST_UNITS = 64
"""Cuts and devices are counted in units of so many blocks and devices that there are at most about so many of them."""
CHANGES_OF_OTHERS = 2_000
"""So many stages, in all small changes, are timed in each order other than 1F1B."""


@dataclass(frozen=True)
class Row:
    """A price with where its devices may stand, in units of devices counted from the end of the line."""

    price: BlockPrice
    units: int
    low: int
    high: int
    room: float
    near: float  # seconds of one transfer (one way) over the link within a node, and between nodes
    far: float

    @property
    def align(self) -> int:
        """Stages stand at multiples of their devices; one across the border of unlike nodes stands there."""
        return 1 if self.price.strategy.shares else self.units


def _corrected(price: BlockPrice, more: tuple[float, float] | None) -> BlockPrice:
    if more is None:
        return price
    held, saved = max(price.held.block + more[0], 0.0), max(price.wholly.saves + more[1], 0.0)
    light = max(price.lightly.saves + min(more[1], 0.0), 0.0)  # what is held beyond the price may not be cheap
    wholly, lightly = replace(price.wholly, saves=saved), replace(price.lightly, saves=light)
    return replace(price, held=replace(price.held, block=held), wholly=wholly, lightly=lightly)


class Space:
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
        pricer: BlockPricer | None = None,
    ) -> None:
        self.cluster, self.size, self.microbatches = cluster, size, batch // size
        self.pricer = pricer or BlockPricer(model.graph_at(size), optimizer=optimizer)
        self.blocks = model.blocks or self.pricer.run.count
        self.grain = ceil(self.blocks / (2 * MOST_UNITS))
        self.cuts = ceil(self.blocks / self.grain) + 1
        self.unit = max(1, 2 ** ceil(np.log2(cluster.size / MOST_UNITS)))
        self.devices = cluster.size // self.unit
        self.most = min(most_stages, self.devices, self.cuts - 1)
        self.rows = self._rows(memory_limit, max_axes)
        self.first, self.last = np.triu_indices(self.cuts, 1)
        shapes = np.stack([self.count_between(self.first, self.last), self.first == 0, self.last == self.cuts - 1])
        self.kinds, kind_of = np.unique(shapes, axis=1, return_inverse=True)
        self.kind_of = kind_of.reshape(-1)
        shapes[2] = shapes[1]  # down and up again: the first group has both ends of the model
        self.v_kinds, kind_of = np.unique(shapes, axis=1, return_inverse=True)
        self.v_kind_of = kind_of.reshape(-1)
        self.far = np.array(
            [(k * self.unit) % self.cluster.nodes[0].devices == 0 for k in range(self.devices + 1)], dtype=bool
        )

    def within(self, memory_limit: float | None) -> Space:
        """The same with fewer bytes per device."""
        if memory_limit is None:
            return self
        narrower = copy(self)
        narrower.rows = [replace(row, room=min(row.room, memory_limit)) for row in self.rows]
        return narrower

    def corrected(self, bytes_of: Mapping[int, tuple[float, float]]) -> Space:
        """The same where blocks of some strategies (by their id) hold more per micro-batch, and save more or less by
        recomputing, than they were priced at."""
        other = copy(self)
        other.rows = [
            replace(row, price=_corrected(row.price, bytes_of.get(id(row.price.strategy)))) for row in self.rows
        ]
        return other

    def count_between(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """How many blocks lie between cuts."""
        return np.minimum(end * self.grain, self.blocks) - np.minimum(start * self.grain, self.blocks)

    def _rows(self, memory_limit: float | None, max_axes: int) -> list[Row]:
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
                    near, far = (link.latency + share / link.bandwidth for link in (inner, network))
                    for mesh in meshes(part, max_axes):
                        room = min(mesh.device.usable_memory, memory_limit or np.inf)
                        for price in self.pricer.prices(mesh, self.microbatches):
                            rows.append(Row(price, count // self.unit, low, high, room, near, far))
                count *= 2
        return rows + self._across(memory_limit, max_axes)

    def _across(self, memory_limit: float | None, max_axes: int) -> list[Row]:
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
                share, units = self.pricer.boundary_bytes / (2 * count), count // self.unit
                near, far = (link.latency + share / link.bandwidth for link in (inner, network))
                for mesh in meshes(replace(self.cluster, nodes=nodes), max_axes):
                    room = min(mesh.device.usable_memory, memory_limit or np.inf)
                    for price in prices_in_shares(self.pricer, mesh, self.microbatches, self.size):
                        rows.append(Row(price, 2 * units, border - units, border + units, room, near, far))
        return rows

    def seconds(self, row: Row, kinds: np.ndarray, held: np.ndarray) -> Recomputing:
        """[kinds, held]: seconds of a micro-batch (infinite where it does not fit), and blocks that recompute."""
        price = row.price
        count, first, last = kinds
        hops = 2 * row.near * (2 - first - last)
        base = price.seconds.of(count, first, last) + hops
        rest, flying = price.resting.of(count, first, last), price.held.of(count, first, last)
        over = rest[:, None] + flying[:, None] * held - row.room
        again = recomputing(price, over, count[:, None], held)
        return again._replace(seconds=base[:, None] + again.seconds)

    def _tables(
        self, rows: Sequence[Row], *, for_bound: bool, closing_counts: float = 1.0, v: bool = False
    ) -> list[StageTable]:
        """One table per size and place of a stage: the best row for every stage and number held, by seconds with
        closing. ``v``: of groups of devices whose first has both ends of the model.
        """
        tables, held = [], np.arange(1, self.most + 1)
        kinds, kind_of = (self.v_kinds, self.v_kind_of) if v else (self.kinds, self.kind_of)
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
            some = np.isfinite(chosen[:, 0])
            extra = np.full(len(self.first), 2 * (alike[0].far - alike[0].near))
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
                    far_in=(extra * (self.first > 0))[some],
                    far_out=(extra * (self.last < self.cuts - 1))[some],
                )
            )
        return tables

    def problem(
        self, rows: Sequence[Row], *, for_bound: bool = False, closing_counts: float = 1.0, v: bool = False
    ) -> PipelineProblem:
        tables = self._tables(rows, for_bound=for_bound, closing_counts=closing_counts, v=v)
        objective = filled_and_drained(self.microbatches)
        return PipelineProblem(f"pipelines of {self.size}", self.cuts, self.devices, pack(tables), objective, self.far)

    def bound(self) -> float:
        """Seconds that no pipeline of this micro-batch size undercuts: one stage per group of devices in any order that
        holds what 1F1B does or more, or interleaved 1F1B and ZB-V."""
        plain, v = (self.problem(self.rows, for_bound=True, v=v) for v in (False, True))
        least = np.inf
        for problem, order, groups in (
            (plain, "1f1b", ONE),
            (plain, "interleaved-1f1b", ROUND),
            (v, "zb-v", DOWN_AND_UP),
        ):
            needed = np.array(least_held(order, self.most, self.microbatches))
            least = no_schedule_below(problem, self.microbatches, self.most, least, needed=needed, groups=groups)
        return least

    def best(self, rows: Sequence[Row] | None = None, improved: bool = True) -> JointPlan | None:
        """The fastest pipeline of these rows that is found; nothing where none fits."""
        rows = self.rows if rows is None else rows
        timed = Timed(self, rows)
        starts: list[list[Run]] = []
        # Closing seconds of later stages run beside the draining of earlier ones: with them and without.
        for closing_counts in (1.0, 0.0) if rows else ():
            try:
                found = compose(self.problem(rows, closing_counts=closing_counts), bounded=False)
            except Infeasible:
                return None
            starts.append([Run(stage.start, stage.end, stage.devices) for stage in found.answer])
        if improved and rows and (few := timed.fastest_of_few()) is not None:
            starts.append(few)
        plans = [timed.improved(runs) if improved else timed.plan(runs) for runs in starts]
        return min(filter(None, plans), key=lambda plan: plan.step_seconds, default=None)

    def ordered(self, schedule: str, starts: Sequence[JointPlan]) -> JointPlan | None:
        """The fastest pipeline in another order than 1F1B that is found from others; nothing where none fits."""
        timed = Timed(self, self.rows, schedule)
        few = timed.fastest_of_few()
        runs = [few] if few is not None else [self.runs(plan) for plan in starts]
        plans = [timed.improved(one, CHANGES_OF_OTHERS) for one in runs]
        return min(filter(None, plans), key=lambda plan: plan.step_seconds, default=None)

    def runs(self, plan: JointPlan) -> list[Run]:
        """The composition of a plan with one stage per group of devices."""
        cuts = [ceil(stage.first_block / self.grain) for stage in plan.stages] + [self.cuts - 1]
        devices = (stage.devices // self.unit for stage in plan.stages)
        return [Run(*ends, units) for ends, units in zip(pairwise(cuts), devices, strict=True)]
