"""Throughput, not contiguous: any block on any device, as an integer program with incumbent and bound at the time limit.

The model is the integer program of "Efficient Algorithms for Device Placement" (2020): x[block, device], and per transfer
and device whether it is received and sent there. It is solved with CP-SAT, whose pigeonhole reasoning closes the
bin-packing gap that linear relaxations leave open on stacks of equal layers. Times are rounded down to a grid of about 1e-9
of the incumbent, so the bound it proves holds for the true times; costs are recomputed exactly from the placement. The
search starts from the contiguous optimum (or the heuristics) improved by moves and swaps, and never returns worse.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shardwright.errors import Infeasible, ProblemError, TooLarge
from shardwright.search.place.baselines import local_search
from shardwright.search.place.bounds import progress_bound
from shardwright.search.place.contiguous import place_contiguous
from shardwright.search.place.heuristics import place_heuristically, refine, supported
from shardwright.search.place.lines import Cut
from shardwright.search.place.measure import throughput_cost, violations
from shardwright.search.place.problem import Placement, Rules, Stage, Workload, one_stage_per_device
from shardwright.search.place.reductions import Blocks, absorb_free_blocks, contract_classes
from shardwright.search.solution import Solution

_GRID = 1e9
_BEYOND = 2 * _GRID  # what is this large fits nowhere and is slower than anything; more has no 64 bits
_LARGEST = 200_000  # block-device pairs beyond which the integer program is not attempted


def place_anywhere(
    workload: Workload, rules: Rules | None = None, *, time_limit: float = 60.0, workers: int = 2, seed: int = 0
) -> Solution[Placement]:
    """The best placement found for throughput without contiguity, its cost and the bound proved by the time limit.

    Example: ``place_anywhere(read_workload("bert24.json"), time_limit=30).gap``.
    """
    begun = time.perf_counter()
    rules = rules or Rules()
    if rules.replicate:
        raise ProblemError("replication needs contiguous stages.", "Drop --noncontiguous or --replicate.")
    blocks = absorb_free_blocks(contract_classes(workload))
    stages = one_stage_per_device(workload.kinds)
    start = _start(workload, blocks, rules, time_limit / 3)
    bound = sum(progress_bound(blocks, rules, p) for p in range(2 if rules.separate_passes else 1))
    left = time_limit - (time.perf_counter() - begun)
    proved_already = start is not None and throughput_cost(workload, start, rules) <= bound * (1 + 1e-9)
    if left > 0 and not proved_already and blocks.count * len(stages) <= _LARGEST:
        start, proved = _integer_program(workload, blocks, rules, start, max(left, 0.1), workers, seed)
        bound = max(bound, proved)
    if start is None:
        raise Infeasible("no placement was found that fits the devices.", "Allow more devices, memory or time.")
    cost = throughput_cost(workload, start, rules)
    optimal = bound >= cost * (1 - 1e-6)
    return Solution(start, cost, min(bound, cost), optimal, time.perf_counter() - begun)


def _start(workload: Workload, blocks: Blocks, rules: Rules, seconds: float) -> Placement | None:
    """The best of: contiguous optimum, heuristics, local search; each improved without regard to contiguity."""
    found: list[Placement] = []
    for solve in (
        lambda: place_contiguous(workload, rules, most_ideals=2_000_000, time_limit=seconds),
        lambda: place_heuristically(workload),
    ):
        try:
            found.append(solve().answer)
        except (Infeasible, TooLarge):
            continue
        break
    if blocks.count <= 400 and seconds > 1:
        found.append(local_search(workload, rules))
    candidates = found + [better for p in found if (better := _loosened(workload, blocks, rules, p)) is not None]
    valid = [p for p in candidates if not violations(workload, p, contiguous=False)]
    return min(valid, key=lambda p: throughput_cost(workload, p, rules), default=None)


def _loosened(workload: Workload, blocks: Blocks, rules: Rules, placement: Placement) -> Placement | None:
    """The placement on all devices, improved by moves and swaps that ignore contiguity."""
    stages = one_stage_per_device(workload.kinds)
    number = {(stage.kind, stage.devices[0]): i for i, stage in enumerate(stages)}
    own = np.array([number[s.kind, s.devices[0]] for s in placement.stages], dtype=np.int64)
    device_of = np.zeros(blocks.count, dtype=np.int64)
    device_of[blocks.block_of] = own[placement.stage_of]
    cut = Cut(device_of, np.array([stage.kind for stage in stages]))
    if not supported(blocks, cut):
        return None
    improved, _ = refine(blocks, cut, rules, passes=50, ordered=False)
    return Placement(blocks.back(improved.stage_of), stages)


def _integer_program(
    workload: Workload, blocks: Blocks, rules: Rules, start: Placement | None, seconds: float, workers: int, seed: int
) -> tuple[Placement | None, float]:
    from ortools.sat.python import cp_model

    stages = one_stage_per_device(workload.kinds)
    finite = np.where(np.isfinite(blocks.times), blocks.times, 0.0)
    ceiling = (
        throughput_cost(workload, start, rules) if start is not None else float(finite.sum() + 2 * blocks.cost.sum())
    )
    scale = _GRID / max(ceiling, 1e-300)
    model = cp_model.CpModel()
    passes = 2 if rules.separate_passes else 1
    top = [model.new_int_var(0, int(_GRID) + 1, f"load{p}") for p in range(passes)]
    model.add(sum(top) <= int(_GRID) + 1)
    runs = np.isfinite(blocks.times.sum(axis=2))
    x = {(b, d): model.new_bool_var("") for b in range(blocks.count) for d, s in enumerate(stages) if runs[b, s.kind]}
    for b in range(blocks.count):
        model.add_exactly_one(x[b, d] for d in range(len(stages)) if (b, d) in x)
    hint = _canonical(workload, blocks, start) if start is not None else None
    for d, stage in enumerate(stages):
        kind = workload.kinds[stage.kind]
        inside = [b for b in range(blocks.count) if (b, d) in x]
        if np.isfinite(kind.room) and blocks.memory.sum() > kind.room:
            unit = _GRID / kind.room
            taken = (int(min(blocks.memory[b] * unit, _BEYOND)) * x[b, d] for b in inside)
            model.add(sum(taken) <= int(_GRID * (1 + 1e-9)))
        costs = blocks.cost if passes == 2 else blocks.cost.sum(axis=1, keepdims=True)
        scaled = np.minimum(costs * kind.pays * scale, _BEYOND).astype(np.int64)
        received, sent = _transfer_terms(model, blocks, x, d, scaled)
        for p in range(passes):
            columns = slice(None) if passes == 1 else slice(p, p + 1)
            times = {b: min(blocks.times[b, stage.kind, columns].sum() * scale, _BEYOND) for b in inside}
            work = sum(int(times[b]) * x[b, d] for b in inside)
            parts = [work, sum(c[p] * v for c, v in received), sum(c[p] * v for c, v in sent)]
            for term in parts if rules.overlap else [sum(parts)]:
                model.add(term <= top[p])
    _order_equal_devices(model, x, stages, blocks.count)
    if hint is not None:
        for (b, d), variable in x.items():
            model.add_hint(variable, bool(hint[b] == d))
    model.minimize(sum(top))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        if start is None:
            raise Infeasible("no placement fits the devices' memory and support.", "Allow more devices or memory.")
        return start, ceiling * (1 - 1e-8)
    best = start
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        device_of = np.zeros(blocks.count, dtype=np.int64)
        for (b, d), variable in x.items():
            if solver.value(variable):
                device_of[b] = d
        found = Placement(blocks.back(device_of), stages)
        # Rounded memory can overfill a device by a few bytes in 1e9: such an answer is not one.
        if not violations(workload, found, contiguous=False) and (
            best is None or throughput_cost(workload, found, rules) < ceiling
        ):
            best = found
    return best, max(0.0, solver.best_objective_bound / scale)


def _transfer_terms(
    model: Any, blocks: Blocks, x: dict[tuple[int, int], Any], device: int, costs: np.ndarray
) -> tuple[list[tuple[list[int], Any]], list[tuple[list[int], Any]]]:
    """(cost per pass, variable) of every transfer that the device receives, and of every one that it sends."""
    received, sent = [], []
    for t, home in enumerate(blocks.home.tolist()):
        if not costs[t].any():
            continue
        arrives, leaves = model.new_bool_var(""), model.new_bool_var("")
        here = x.get((home, device))
        for r in blocks.receivers[blocks.receiver_start[t] : blocks.receiver_start[t + 1]].tolist():
            there = x.get((r, device))
            if there is not None:
                model.add_bool_or([there.negated(), arrives, *([here] if here is not None else [])])
            if here is not None:
                model.add_bool_or([here.negated(), leaves, *([there] if there is not None else [])])
        received.append((costs[t].tolist(), arrives))
        sent.append((costs[t].tolist(), leaves))
    return received, sent


def _order_equal_devices(model: Any, x: dict[tuple[int, int], Any], stages: tuple[Stage, ...], count: int) -> None:
    """Equal devices are interchangeable: a device's first block comes before the first block of the next one."""
    for d in range(1, len(stages)):
        if stages[d].kind != stages[d - 1].kind:
            continue
        for b in range(count):
            if (b, d) in x:
                model.add_bool_or([x[b, d].negated(), *(x[a, d - 1] for a in range(b) if (a, d - 1) in x)])


def _canonical(workload: Workload, blocks: Blocks, placement: Placement) -> np.ndarray:
    """The device of every block, with equal devices renamed in the order of their first blocks."""
    first_of_kind = np.cumsum([0, *(kind.count for kind in workload.kinds)])
    stage_of = np.zeros(blocks.count, dtype=np.int64)
    stage_of[blocks.block_of] = placement.stage_of
    name: dict[int, int] = {}
    used: dict[int, int] = {}
    for stage in stage_of.tolist():
        if stage not in name:
            kind = placement.stages[stage].kind
            name[stage] = int(first_of_kind[kind]) + used.get(kind, 0)
            used[kind] = used.get(kind, 0) + 1
    return np.array([name[stage] for stage in stage_of.tolist()])
