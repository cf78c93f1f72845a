"""Small pipelines exactly: an interval program for CP-SAT, with memory as a reservoir that forwards fill and
gradients empty.

Variables are the starts of all passes; those of a device do not overlap, micro-batches keep their order, results
arrive a hop later, and what the device holds never exceeds its limit. Seconds become whole units, rounded down, so
the bound it proves is one for the true times; the order it finds is timed exactly afterwards.
"""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from shardwright.schedules._flat import F, FlatPipeline, I, Ints, W

UNITS = 1_000_000
"""Units of time per longest pass, where seconds are not whole numbers already."""


def solve_exactly(
    flat: FlatPipeline, numbers: Ints, begins: Ints, starts: np.ndarray, makespan: bool, bound: float, seconds: float
) -> tuple[Ints, float]:
    """Improve an order within a time limit; the order (maybe the same) and a lower bound on the measure."""
    whole = bool(
        np.all(flat.seconds == np.floor(flat.seconds)) and np.all(flat.source_hop == np.floor(flat.source_hop))
    )
    scale = 1.0 if whole else UNITS / max(float(flat.seconds.max()), 1e-300)
    length = np.floor(flat.seconds * scale + 1e-9).astype(np.int64)
    horizon = int((starts.max() + flat.seconds.max()) * scale) + 1
    size, microbatches = flat.stages * flat.microbatches, flat.microbatches
    model = cp_model.CpModel()
    start = {int(n): model.new_int_var(0, horizon, f"s{n}") for n in numbers}

    def end(number: int) -> cp_model.LinearExpr:
        return start[number] + int(length.reshape(-1)[number])

    def number_of(kind: int, stage: int, i: int) -> int:
        return (kind * flat.stages + stage) * microbatches + i

    for stage in range(flat.stages):
        for i in range(microbatches):
            mine = [number_of(kind, stage, i) for kind in (F, I, W)]
            model.add(start[mine[1]] >= end(mine[0]))
            model.add(start[mine[2]] >= end(mine[1]))
            for k in range(flat.source_at[stage], flat.source_at[stage + 1]):
                source, hop = int(flat.source[k]), int(np.floor(flat.source_hop[k] * scale + 1e-9))
                model.add(start[mine[0]] >= end(number_of(F, source, i)) + hop)
                model.add(start[number_of(I, source, i)] >= end(mine[1]) + hop)
            if i + 1 < microbatches:
                for kind, number in enumerate(mine):
                    model.add(start[number_of(kind, stage, i + 1)] >= end(number))
    measures = []
    for device in range(len(begins) - 1):
        mine = [int(n) for n in numbers[begins[device] : begins[device + 1]]]
        if not mine:
            continue
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(start[n], int(length.reshape(-1)[n]), f"i{n}") for n in mine]
        )
        _limit_memory(model, flat, device, mine, start)
        last = model.new_int_var(0, horizon + int(length.max()), f"last{device}")
        first = model.new_int_var(0, horizon, f"first{device}")
        for n in mine:
            model.add(last >= end(n))
            if n < size and n % microbatches == 0:
                model.add(first <= start[n])
        measures.append(last if makespan else last - first)
    worst = model.new_int_var(int(np.floor(bound * scale * (1 - 1e-12))), 2 * horizon, "worst")
    for value in measures:
        model.add(worst >= value)
    model.minimize(worst)
    for n, when in zip(numbers.tolist(), starts.tolist(), strict=True):
        model.add_hint(start[int(n)], int(when * scale))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    proved = max(bound, solver.best_objective_bound / scale) if status != cp_model.UNKNOWN else bound
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return numbers, proved
    order = numbers.copy()
    for low, high in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        order[low:high] = sorted(order[low:high].tolist(), key=lambda n: (solver.value(start[n]), n))
    return order, proved


def _limit_memory(model: cp_model.CpModel, flat: FlatPipeline, device: int, mine: list[int], start: dict) -> None:
    """What the device holds after any pass stays within its limit; whole numbers, rounded so that nothing allowed is
    forbidden.
    """
    limit = float(flat.limit[device])
    changes = flat.memory.reshape(-1)[mine]
    if changes[changes > 0].sum() <= limit:
        return
    exact = bool(np.all(changes == np.floor(changes)))
    scale = 1.0 if exact else 1e9 / max(float(np.abs(changes).max()), 1e-300)
    units = [int(np.floor(change * scale)) for change in changes]
    model.add_reservoir_constraint(
        [start[n] for n in mine], units, -(2**40), int(np.floor(limit * scale * (1 + 1e-12)))
    )
