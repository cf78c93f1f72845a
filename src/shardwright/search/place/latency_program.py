"""The constraint program for latency: assignment, start and finish times, solved with CP-SAT under a time limit.

Beside the defining constraints it states what every path says: the nodes on a path take their times one after the other,
and wherever the path changes place both sides pay the transfer. Together with the memory limits, which force changes of
place, that closes the gap the subgraphs' start times alone leave open. Times are rounded down to a grid, plus one unit per
step so that waiting in a cycle is impossible; the bound is corrected for both, so it holds for the true times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from shardwright.search.place.deadline import Deadline
    from shardwright.search.place.latency import Slots

LARGEST = 60_000  # node-slot pairs beyond which the program is not attempted
_GRID = 1e8


def solve_latency(
    slots: Slots, start: np.ndarray | None, floor: float, ceiling: float, deadline: Deadline, workers: int, seed: int
) -> tuple[np.ndarray | None, float]:
    """The slot of every node (-1: host) and a proved lower bound, given that no latency is below ``floor`` and that
    of ``start`` (if any) is ``ceiling``; nothing where the time does not even suffice to state the program."""
    from ortools.sat.python import cp_model

    workload, count = slots.workload, len(slots.stages)
    n = workload.nodes
    if not np.isfinite(ceiling):
        finite = np.where(np.isfinite(workload.times), workload.times, 0.0)
        ceiling = float(finite.max(axis=1).sum() + 2 * workload.transfer.sum() * max(1.0, slots.pays.max(initial=1.0)))
    scale = _GRID / ceiling
    steps = n + count
    horizon = int(_GRID) + steps

    def grid(value: float) -> int:
        return int(np.floor(value * scale))

    model = cp_model.CpModel()
    at, host = _assignment(model, slots, deadline)
    finish = [model.new_int_var(0, horizon, "") for _ in range(n)]
    begins = [model.new_int_var(0, horizon, "") for _ in range(count)]
    ends = [model.new_int_var(0, horizon, "") for _ in range(count)]
    along = [model.new_int_var(0, horizon, "") for _ in range(n)]  # what the paths into a node need, with its own time
    latest = model.new_int_var(min(grid(floor), horizon), horizon, "latency")
    loads: list[list[Any]] = [[1] for _ in range(count)]
    successors: list[list[int]] = [[] for _ in range(n)]
    for u, v in workload.edges.tolist():
        successors[u].append(v)
    for v in range(n):
        if deadline.passed:
            return None, floor
        own = [grid(slots.slot_time[v, m]) * at[v, m] for m in range(count) if (v, m) in at]
        if host[v] is not None:
            own.append(grid(slots.host_time[v]) * host[v])
            model.add(finish[v] >= grid(slots.host_time[v]) + 1).only_enforce_if(host[v])
        model.add(along[v] >= sum(own))
        model.add(latest >= along[v])
        model.add(latest >= finish[v])
        for m in range(count):
            if (v, m) in at:
                loads[m].append(grid(slots.slot_time[v, m]) * at[v, m])
                model.add(finish[v] >= ends[m]).only_enforce_if(at[v, m])
    variables = _Variables(at, host, finish, begins, along, loads)
    for u in range(n):
        if deadline.passed:
            return None, floor
        if successors[u]:
            _moves(model, slots, u, successors[u], variables, grid)
    for m in range(count):
        model.add(ends[m] >= begins[m] + sum(loads[m]))
        if slots.follows[m] >= 0:
            model.add(begins[m] >= ends[int(slots.follows[m])])
    if start is not None:
        _hint(model, slots, start, at, host)
    model.minimize(latest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.0, deadline.left)  # stating it took some
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:  # nothing below the start
        return None, (_GRID - steps) / scale if start is not None else np.inf
    bound = max(0.0, (solver.best_objective_bound - steps) / scale)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, bound
    slot_of = np.full(n, -1, dtype=np.int64)
    for (v, m), variable in at.items():
        if solver.value(variable):
            slot_of[v] = m
    return slot_of, bound


def _assignment(model: Any, slots: Slots, deadline: Deadline) -> tuple[dict[tuple[int, int], Any], list[Any]]:
    """Variables: node v runs in slot m; node v runs on the host (None where it cannot). Classes share a device. Not all of
    them once the deadline has passed."""
    workload = slots.workload
    subgraphs = max(1, int((slots.device == 0).sum()))
    members = [np.flatnonzero(workload.classes == c).tolist() for c in range(int(workload.classes.max(initial=-1)) + 1)]
    at: dict[tuple[int, int], Any] = {}
    host: list[Any] = [None] * workload.nodes
    on: list[list[Any]] = []
    for nodes in members:
        if deadline.passed:
            return at, host
        devices: list[Any] = []
        for d in range(len(slots.room)):
            mine = np.flatnonzero(slots.device == d).tolist()
            if np.isfinite(slots.slot_time[nodes][:, mine]).all():
                devices.append(model.new_bool_var(""))
                for v in nodes:
                    if subgraphs == 1:
                        at[v, mine[0]] = devices[-1]
                    else:
                        for m in mine:
                            at[v, m] = model.new_bool_var("")
                        model.add(sum(at[v, m] for m in mine) == devices[-1])
            else:
                devices.append(None)
        choices = [variable for variable in devices if variable is not None]
        if np.isfinite(slots.host_time[nodes]).all():
            choices.append(model.new_bool_var(""))
            for v in nodes:
                host[v] = choices[-1]
        model.add_exactly_one(choices)
        on.append(devices)
    sizes = [float(workload.memory[nodes].sum()) for nodes in members]
    for d, room in enumerate(slots.room):
        if np.isfinite(room) and sum(sizes) > room:
            unit = _GRID / max(room, 1e-300)
            terms = [
                int(np.floor(size * unit)) * row[d] for size, row in zip(sizes, on, strict=True) if row[d] is not None
            ]
            model.add(sum(terms) <= int(_GRID * (1 + 1e-9)))
        same = d > 0 and slots.stages[d * subgraphs].kind == slots.stages[(d - 1) * subgraphs].kind
        for c, row in enumerate(on):  # equal devices: the first class of a device comes before that of the next
            if deadline.passed:
                return at, host
            if same and row[d] is not None:
                earlier = [on[e][d - 1] for e in range(c) if on[e][d - 1] is not None]
                model.add_bool_or([row[d].negated(), *earlier])
    return at, host


class _Variables(NamedTuple):
    """The program's variables: where nodes run, when they finish, when slots begin, the longest way to every node; and what
    adds up to the seconds of every slot."""

    at: dict[tuple[int, int], Any]
    host: list[Any]
    finish: list[Any]
    begins: list[Any]
    along: list[Any]
    loads: list[list[Any]]


def _moves(model: Any, slots: Slots, u: int, successors: list[int], variables: _Variables, grid: Any) -> None:
    """What node u's output costs and delays in every slot it enters or leaves, and along every edge."""
    at, host, finish, begins, along, loads = variables
    transfer = float(slots.workload.transfer[u])
    cheapest = grid(transfer * slots.pays.min(initial=0.0)) if len(slots.pays) else 0
    entering: dict[int, list[tuple[Any, Any]]] = {v: [] for v in successors}
    leaving: dict[int, list[tuple[Any, Any]]] = {v: [] for v in successors}
    for m in range(len(slots.stages)):
        here = at.get((u, m))
        arrives, leaves = model.new_bool_var(""), model.new_bool_var("")
        for v in successors:
            there = at.get((v, m))
            if there is not None:
                model.add_bool_or([there.negated(), arrives, *([here] if here is not None else [])])
                entering[v].append((there, here))
            if here is not None:
                model.add_bool_or([here.negated(), leaves, *([there] if there is not None else [])])
                leaving[v].append((here, there))
        model.add(begins[m] >= finish[u]).only_enforce_if(arrives)
        loads[m] += [grid(transfer * slots.pays[m]) * arrives, grid(transfer * slots.pays[m]) * leaves]
    for v in successors:
        own = [grid(slots.slot_time[v, m]) * at[v, m] for m in range(len(slots.stages)) if (v, m) in at]
        if host[v] is not None:
            model.add(finish[v] >= finish[u] + grid(slots.host_time[v]) + 1).only_enforce_if(host[v])
            own.append(grid(slots.host_time[v]) * host[v])
        received, sent = model.new_bool_var(""), model.new_bool_var("")
        for pairs, paid in ((entering[v], received), (leaving[v], sent)):
            for inside, other in pairs:
                model.add_bool_or([inside.negated(), paid, *([other] if other is not None else [])])
        model.add(along[v] >= along[u] + sum(own) + cheapest * received + cheapest * sent)


def _hint(model: Any, slots: Slots, start: np.ndarray, at: dict[tuple[int, int], Any], host: list[Any]) -> None:
    """Suggest the start, with equal accelerators renamed in the order of their first classes."""
    subgraphs = max(1, int((slots.device == 0).sum()))
    kind_of = [slots.stages[d * subgraphs].kind for d in range(len(slots.room))]
    name: dict[int, int] = {}
    for c in range(int(slots.workload.classes.max(initial=-1)) + 1):
        v = int(np.argmax(slots.workload.classes == c))
        d = int(slots.device[start[v]]) if start[v] >= 0 else -1
        if d >= 0 and d not in name:
            taken = set(name.values())
            name[d] = next(e for e in range(len(kind_of)) if kind_of[e] == kind_of[d] and e not in taken)
    hinted: set[int] = set()
    for v in range(len(start)):
        slot = int(start[v])
        target = -1 if slot < 0 else name[int(slots.device[slot])] * subgraphs + slot % subgraphs
        for m in range(len(slots.stages)):
            if (v, m) in at and at[v, m].index not in hinted:
                hinted.add(at[v, m].index)
                model.add_hint(at[v, m], m == target)
        if host[v] is not None and host[v].index not in hinted:
            hinted.add(host[v].index)
            model.add_hint(host[v], slot < 0)
