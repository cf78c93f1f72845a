"""One door to every placement solver: an objective, a solver by name, and what comes back is a ``Solution``.

For throughput ``auto`` is the exact contiguous search, or the heuristics where the graph has too many ideals (or the
integer program when contiguity is not asked for); for latency it is annealing followed by the constraint program.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from shardwright.errors import Infeasible, ProblemError, TooLarge
from shardwright.search.place import baselines
from shardwright.search.place.bounds import progress_bound
from shardwright.search.place.contiguous import place_contiguous
from shardwright.search.place.deadline import Deadline
from shardwright.search.place.heuristics import place_heuristically
from shardwright.search.place.latency import FOR_STARTS, best_start, greedy_fills, place_for_latency, slots_of
from shardwright.search.place.measure import throughput_cost, violations
from shardwright.search.place.noncontiguous import place_anywhere
from shardwright.search.place.problem import Placement, Rules, Workload
from shardwright.search.place.reductions import contract_classes, reduce
from shardwright.search.solution import Solution

AUTO_IDEALS = 3_000_000
AUTO_NODES = 20_000
OBJECTIVES = ("throughput", "latency")


def place(
    workload: Workload,
    objective: str = "throughput",
    *,
    solver: str = "auto",
    contiguous: bool = True,
    rules: Rules | None = None,
    subgraphs: int = 1,
    time_limit: float = 60.0,
    seed: int = 0,
) -> Solution[Placement]:
    """Place a workload. Example: ``place(read_workload("bert24.json"), "latency", time_limit=10).cost``."""
    if objective not in OBJECTIVES:
        raise ProblemError(f"there is no objective {objective!r}.", f"Choose one of {', '.join(OBJECTIVES)}.")
    rules = rules or Rules()
    table = _latency_solvers(workload, subgraphs, time_limit, seed)
    if objective == "throughput":
        table = _throughput_solvers(workload, rules, contiguous, time_limit, seed)
    elif rules != Rules():
        raise ProblemError(
            "latency counts one sample: transfers are not overlapped, stages not replicated, passes not separate.",
            "Drop those options or minimise throughput cost.",
        )
    if solver not in table:
        raise ProblemError(f"no solver {solver!r} for {objective}.", f"Choose one of {', '.join(table)}.")
    return table[solver]()


Solver = Callable[[], Solution[Placement]]


def _throughput_solvers(
    workload: Workload, rules: Rules, contiguous: bool, time_limit: float, seed: int
) -> dict[str, Solver]:
    def fixed_order() -> Solution[Placement]:
        return place_contiguous(workload, rules, order=np.arange(reduce(workload).count))

    def auto() -> Solution[Placement]:
        if not contiguous:
            return place_anywhere(workload, rules, time_limit=time_limit, seed=seed)
        try:
            if workload.nodes <= AUTO_NODES:
                return place_contiguous(workload, rules, most_ideals=AUTO_IDEALS, time_limit=time_limit)
        except TooLarge:
            pass
        return (
            fixed_order() if rules.replicate and workload.nodes <= AUTO_NODES else place_heuristically(workload, rules)
        )

    return {
        "auto": auto,
        "exact": lambda: place_contiguous(workload, rules, time_limit=time_limit),
        "order": fixed_order,
        "heuristic": lambda: place_heuristically(workload, rules),
        "program": lambda: place_anywhere(workload, rules, time_limit=time_limit, seed=seed),
        "local-search": lambda: _measured(workload, rules, lambda: baselines.local_search(workload, rules, seed=seed)),
        "equal-shares": lambda: _measured(workload, rules, lambda: baselines.equal_shares(workload)),
        "one-device": lambda: _measured(workload, rules, lambda: baselines.one_device(workload)),
    }


def _latency_solvers(workload: Workload, subgraphs: int, time_limit: float, seed: int) -> dict[str, Solver]:
    def heuristic(greedy: bool) -> Solution[Placement]:
        from shardwright.search.place.latency_bounds import critical_path, path_bound

        begun = time.perf_counter()
        with Deadline(time_limit) as deadline:
            slots = slots_of(workload, subgraphs)
            found: np.ndarray | None
            if greedy:
                found = min(greedy_fills(slots), key=lambda s: slots.finish_times(s)[0] if slots.fits(s) else np.inf)
            else:
                with deadline.part(FOR_STARTS) as part:
                    found = best_start(slots, part, seed=seed)
            if found is None or not slots.fits(found):
                raise Infeasible("the heuristics found nothing that fits.", "Use --solver program or more memory.")
            cost = slots.finish_times(found)[0]
            bound = min(cost, max(critical_path(workload), path_bound(workload, subgraphs, deadline)))
        return Solution(slots.placement(found), cost, bound, bound >= cost * (1 - 1e-6), time.perf_counter() - begun)

    def program() -> Solution[Placement]:
        return place_for_latency(workload, subgraphs=subgraphs, time_limit=time_limit, seed=seed)

    return {
        "auto": program,
        "program": program,
        "heuristic": lambda: heuristic(greedy=False),
        "greedy": lambda: heuristic(greedy=True),
    }


def _measured(workload: Workload, rules: Rules, build: Callable[[], Placement]) -> Solution[Placement]:
    begun = time.perf_counter()
    placement = build()
    wrong = violations(workload, placement, contiguous=False)
    if wrong:
        raise Infeasible(f"this baseline does not fit: {wrong[0]}.", "Use --solver auto.")
    cost = throughput_cost(workload, placement, rules)
    blocks = contract_classes(workload)
    bound = sum(progress_bound(blocks, rules, p) for p in range(2 if rules.separate_passes else 1))
    return Solution(placement, cost, min(bound, cost), bound >= cost * (1 - 1e-9), time.perf_counter() - begun)
