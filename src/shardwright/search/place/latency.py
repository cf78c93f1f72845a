"""Latency: the smallest finish time of one sample, contiguous subgraphs on accelerators, hosts pooled.

The objective is that of "Efficient Algorithms for Device Placement" (2020): an accelerator runs at most q subgraphs, one
after the other, each starting when all its inputs are there and paying for every input from outside and every output
that leaves; host nodes run as soon as they can. Starts come from the best sequence of stages (the chain search with summed
loads), from filling memory greedily, and from annealing; ``latency_program`` then searches and proves.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardwright.errors import Infeasible, ProblemError, TooLarge
from shardwright.search.place.contiguous import ChainSearch
from shardwright.search.place.deadline import Deadline
from shardwright.search.place.heuristics import orders
from shardwright.search.place.measure import violations
from shardwright.search.place.problem import Placement, Rules, Stage, Workload
from shardwright.search.place.reductions import Blocks, reduce
from shardwright.search.solution import Solution

if TYPE_CHECKING:
    from shardwright.search.place._latency import Units

_ANNEALING_STEPS = (60_000, 600_000)  # per start: a quick round first, then a long one
_ANNEALING_VISITS = 400_000_000
FOR_STARTS, FOR_PATHS = 0.5, 0.5  # of what is left of the time: for the first placements, then for bounds of paths


@dataclass(frozen=True, eq=False)
class Slots:
    """The places where subgraphs can run: q per accelerator, in order of execution; and the graph they run."""

    workload: Workload
    blocks: Blocks  # what the heuristics move together
    stages: tuple[Stage, ...]
    device: np.ndarray  # [slots]
    room: np.ndarray  # [devices] bytes
    follows: np.ndarray  # [slots] slot before it on the same device, or -1
    host: int  # kind of the pooled host, or -1
    host_time: np.ndarray  # [nodes]
    slot_time: np.ndarray  # [nodes, slots]
    pays: np.ndarray  # [slots]
    edge_start: np.ndarray
    edge_target: np.ndarray

    def finish_times(self, slot_of: np.ndarray) -> tuple[float, np.ndarray]:
        """The latency (infinite when subgraphs wait for each other) and the finish of every node and slot."""
        from shardwright.search.place._latency import finish_time, scratch_for

        scratch = scratch_for(self.workload.nodes, len(self.stages))
        value = finish_time(np.asarray(slot_of, dtype=np.int64), self.units, scratch)
        return float(value), scratch.finish

    @property
    def units(self) -> Units:
        """The same for compiled code."""
        from shardwright.search.place._latency import Units

        return Units(
            self.host_time,
            self.slot_time,
            self.pays,
            self.follows,
            self.workload.transfer,
            self.edge_start,
            self.edge_target,
        )

    def fits(self, slot_of: np.ndarray) -> bool:
        """Whether memory, support and co-location allow it."""
        inside = slot_of >= 0
        held = np.bincount(self.device[slot_of[inside]], weights=self.workload.memory[inside], minlength=len(self.room))
        runs = np.where(inside, self.slot_time[np.arange(len(slot_of)), slot_of], self.host_time)
        devices = np.where(inside, self.device[slot_of], -1)
        first = np.zeros(int(self.workload.classes.max(initial=0)) + 1, dtype=np.int64)
        first[self.workload.classes] = devices
        together = (devices == first[self.workload.classes]).all()
        return bool((held <= self.room * (1 + 1e-9)).all() and np.isfinite(runs).all() and together)

    def placement(self, slot_of: np.ndarray) -> Placement:
        """The placement with empty subgraphs left out; host nodes share one pooled stage."""
        used = [s for s in range(len(self.stages)) if (slot_of == s).any()]
        stages = [self.stages[s] for s in used]
        number = np.full(len(self.stages) + 1, -1, dtype=np.int64)
        number[used] = np.arange(len(used))
        if (slot_of < 0).any():
            number[-1] = len(stages)
            stages.append(Stage(self.host, tuple(range(self.workload.kinds[self.host].count))))
        return Placement(number[slot_of], tuple(stages))


def slots_of(workload: Workload, subgraphs: int = 1) -> Slots:
    """Prepare a workload for latency with up to ``subgraphs`` subgraphs per accelerator."""
    from shardwright.search.place._graphs import rows

    if workload.backward.any():
        raise ProblemError("latency is the time of one forward sample.", "Give an inference workload.")
    if subgraphs < 1:
        raise ProblemError(f"{subgraphs} subgraphs per accelerator run nothing.", "Allow at least 1.")
    hosts = [k for k, kind in enumerate(workload.kinds) if kind.host and kind.count > 0]
    devices = [(k, i) for k, kind in enumerate(workload.kinds) if not kind.host for i in range(kind.count)]
    stages = tuple(Stage(k, (i,)) for k, i in devices for _ in range(subgraphs))
    kinds = np.array([stage.kind for stage in stages], dtype=np.int64)
    number = np.arange(len(stages))
    host_time = workload.times[:, hosts].min(axis=1) if hosts else np.full(workload.nodes, np.inf)
    return Slots(
        workload=workload,
        blocks=reduce(workload),
        stages=stages,
        device=number // subgraphs,
        room=np.array([workload.kinds[k].room for k, _ in devices]),
        follows=np.where(number % subgraphs > 0, number - 1, -1),
        host=hosts[0] if hosts else -1,
        host_time=host_time,
        slot_time=np.ascontiguousarray(workload.times[:, kinds]),
        pays=np.array([workload.kinds[k].pays for k in kinds]),
        **dict(
            zip(
                ("edge_start", "edge_target"),
                rows(workload.nodes, workload.edges[:, 0], workload.edges[:, 1]),
                strict=True,
            )
        ),
    )


def latency_cost(workload: Workload, placement: Placement) -> float:
    """The finish time of one sample; infinite when the subgraphs wait for each other in a cycle.

    Subgraphs on one accelerator run in the order of their stage numbers.
    """
    hosts = {s for s, stage in enumerate(placement.stages) if workload.kinds[stage.kind].host}
    own = [s for s in range(len(placement.stages)) if s not in hosts]
    number = np.full(len(placement.stages), -1, dtype=np.int64)
    number[own] = np.arange(len(own))
    stages = tuple(placement.stages[s] for s in own)
    last: dict[Stage, int] = {}
    follows = np.full(len(own), -1, dtype=np.int64)
    for s, stage in enumerate(stages):
        follows[s] = last.get(stage, -1)
        last[stage] = s
    kinds = np.array([stage.kind for stage in stages], dtype=np.int64)
    slots = replace(
        slots_of(workload),
        stages=stages,
        follows=follows,
        slot_time=np.ascontiguousarray(workload.times[:, kinds]),
        pays=np.array([workload.kinds[k].pays for k in kinds]),
    )
    return slots.finish_times(number[placement.stage_of])[0]


def latency_violations(workload: Workload, placement: Placement, subgraphs: int = 1) -> list[str]:
    """Every way in which a placement breaks the rules of the latency problem; empty when it is valid."""
    found = violations(workload, placement, contiguous=False)
    own = [stage for stage in placement.stages if not workload.kinds[stage.kind].host]
    found += [f"{stage} runs more than {subgraphs} subgraphs" for stage in {*own} if own.count(stage) > subgraphs]
    if not found and not np.isfinite(latency_cost(workload, placement)):
        found.append("subgraphs wait for each other in a cycle: the placement is not contiguous")
    return found


def place_for_latency(
    workload: Workload, *, subgraphs: int = 1, time_limit: float = 60.0, workers: int = 2, seed: int = 0
) -> Solution[Placement]:
    """The best placement found for latency, with the bound proved by the time limit.

    Example: ``place_for_latency(read_workload("latency/bert24.json"), time_limit=30).gap``.
    """
    from shardwright.search.place.latency_bounds import critical_path, path_bound
    from shardwright.search.place.latency_program import LARGEST, solve_latency

    begun = time.perf_counter()
    with Deadline(time_limit) as deadline:
        slots = slots_of(workload, subgraphs)
        with deadline.part(FOR_STARTS) as part:
            best = best_start(slots, part, seed=seed)
        value = slots.finish_times(best)[0] if best is not None else np.inf
        with deadline.part(FOR_PATHS) as part:
            bound = max(critical_path(workload), path_bound(workload, subgraphs, part))
        if value > bound * (1 + 1e-9) and workload.nodes * max(1, len(slots.stages)) <= LARGEST:
            found, proved = solve_latency(slots, best, bound, value, deadline, workers, seed)
            bound = max(bound, proved)
            if found is not None and slots.fits(found) and slots.finish_times(found)[0] < value:
                best, value = found, slots.finish_times(found)[0]
    if best is None:
        raise Infeasible("no placement was found that fits the devices.", "Allow more devices, memory or time.")
    optimal = bound >= value * (1 - 1e-6)
    return Solution(slots.placement(best), value, min(bound, value), optimal, time.perf_counter() - begun)


def best_start(slots: Slots, deadline: Deadline, *, seed: int) -> np.ndarray | None:
    """The best of the constructed placements, each improved by annealing while the time lasts."""
    made = _constructed(slots, deadline)
    starts = [s for s in made if slots.fits(s) and np.isfinite(slots.finish_times(s)[0])]
    starts.sort(key=lambda s: slots.finish_times(s)[0])
    improved = list(starts[:1])
    for turn, (steps, start) in enumerate(itertools.product(_ANNEALING_STEPS, starts[:3])):
        if not deadline.passed:
            improved.append(_annealed(slots, start, steps, seed + turn, deadline.flag))
    valid = [s for s in improved if slots.fits(s)]
    return min(valid, key=lambda s: slots.finish_times(s)[0], default=None)


def _constructed(slots: Slots, deadline: Deadline) -> Iterator[np.ndarray]:
    workload, blocks = slots.workload, slots.blocks
    if slots.host >= 0:
        yield np.full(workload.nodes, -1, dtype=np.int64)
    yield from greedy_fills(slots)
    few = tuple(replace(kind, count=min(kind.count, 2)) if kind.host else kind for kind in blocks.kinds)
    first_slot = {(stage.kind, stage.devices): s for s, stage in reversed([*enumerate(slots.stages)])}
    for order in (*(orders(blocks) if blocks.count <= 3_000 else ()), None):  # one order is quick, all of them is not
        if deadline.passed or (order is None and blocks.count > 2_000):
            continue
        try:
            search = ChainSearch(
                replace(blocks, kinds=few), Rules(), order=order, summed=True, most_ideals=60_000, stop=deadline.flag
            )
            chain = search.under(np.array([1e300]))
        except TooLarge:
            continue
        if chain is None:
            continue
        slot = np.array([first_slot.get((s.kind, s.devices), -1) for s in chain.stages] or [-1])
        yield slot[chain.stage_of]


def greedy_fills(slots: Slots) -> Iterator[np.ndarray]:
    """Per topological order: one accelerator after the other takes what fits its memory; what is left runs on the host."""
    blocks = slots.blocks
    first_slots = np.flatnonzero(slots.follows < 0)
    times = blocks.times.sum(axis=2)
    for order in orders(blocks):
        at = np.full(blocks.count, -1, dtype=np.int64)
        device, held = 0, 0.0
        for b in order:
            while device < len(first_slots) and held > 0 and held + blocks.memory[b] > slots.room[device]:
                device, held = device + 1, 0.0
            if device == len(first_slots) or blocks.memory[b] > slots.room[device]:
                continue
            if np.isfinite(times[b, slots.stages[first_slots[device]].kind]):
                at[b] = first_slots[device]
                held += blocks.memory[b]
        yield blocks.back(at)


def _annealed(slots: Slots, start: np.ndarray, steps: int, seed: int, stop: np.ndarray) -> np.ndarray:
    from shardwright.search.place._graphs import rows
    from shardwright.search.place._latency import Groups, anneal

    blocks, workload = slots.blocks, slots.workload
    block_start, block_nodes = rows(blocks.count, blocks.block_of, np.arange(workload.nodes))
    ends = blocks.block_of[workload.edges]
    both = np.concatenate([ends, ends[:, ::-1]])
    both = np.unique(both[both[:, 0] != both[:, 1]], axis=0)
    times = blocks.times.sum(axis=2)
    host = times[:, slots.host] if slots.host >= 0 else np.full(blocks.count, np.inf)
    options = np.column_stack([*(times[:, stage.kind] for stage in slots.stages), host])
    most = _ANNEALING_VISITS // (workload.nodes + len(workload.edges))
    steps = max(2_000, min(steps, most, 8_000 * blocks.count))
    groups = Groups(
        block_start,
        block_nodes,
        *rows(blocks.count, both[:, 0], both[:, 1]),
        np.isfinite(options),
        slots.device,
        slots.room * (1 + 1e-9),
        workload.memory,
    )
    found, _ = anneal(start.copy(), groups, slots.units, steps, 0.02 * slots.finish_times(start)[0], seed, stop)
    return found
