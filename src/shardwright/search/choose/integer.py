"""The choice problem as an integer program for HiGHS: the oracle for small cases.

One binary per option, one continuous variable per allowed pair of options on an edge, tied by the marginals
(Schlesinger's local polytope, the formulation of Alpa and of XLA's auto-sharding), and one row per critical time. Its
bound is HiGHS's own dual bound.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.choose.problem import Edge, Problem, evaluate, tolerance
from shardwright.search.choose.timeline import critical_times
from shardwright.search.solution import Solution

DEFAULT_VARIABLES = 2_000_000
FIRST_ROWS = 400
ROWS_PER_TURN = 100


def solve_by_integer_program(
    problem: Problem,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    incumbent: np.ndarray | None = None,
    max_nodes: int | None = None,
) -> Solution[np.ndarray]:
    """The optimum by branch and cut; with a time limit the best choice so far and HiGHS's bound.

    Rows of memory are added when a choice breaks them; until then they are only relaxed, so the bound holds throughout.
    Example: ``solve_by_integer_program(problem, time_limit=10).optimal``
    """
    import highspy

    started = time.perf_counter()
    program = _Program(problem)
    solver = highspy.Highs()
    options = {
        "output_flag": False,
        "random_seed": int(seed) % 2**31,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 1e-9,
        "mip_feasibility_tolerance": 1e-9,
        "primal_feasibility_tolerance": 1e-9,
    }
    if max_nodes is not None:
        options["mip_max_nodes"] = max_nodes
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(program.model(highspy))
    rows = _Rows(problem, program)
    rows.add(solver, rows.widest(FIRST_ROWS))
    best, bound = incumbent, -np.inf
    best_cost = np.inf if best is None else evaluate(problem, best).cost
    while True:
        if time_limit is not None:
            left = time_limit - (time.perf_counter() - started)
            if left <= 0:
                break
            solver.setOptionValue("time_limit", left)  # of each run, not of all of them
        if best is not None:
            start = highspy.HighsSolution()
            start.col_value = program.columns_of(best)
            solver.setSolution(start)
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            raise Infeasible(
                f"No choice of {problem.name} keeps its limit of {problem.usage_limit}.", "Raise the limit."
            )
        info = solver.getInfo()
        proved = status == highspy.HighsModelStatus.kOptimal
        bound = max(bound, float(info.objective_function_value if proved else info.mip_dual_bound) * program.scale)
        values = np.array(solver.getSolution().col_value)
        if info.primal_solution_status != 2 or len(values) == 0:
            break
        choice = np.array([int(np.argmax(values[start:stop])) for start, stop in program.spans], dtype=np.int64)
        cost, _, feasible = evaluate(problem, choice)
        if feasible and cost < best_cost:
            best, best_cost = choice, cost
        if feasible:
            bound = max(bound, cost) if proved else bound
            break
        broken = rows.broken(choice)
        if not len(broken):
            break
        rows.add(solver, broken)
    if best is None:
        raise TooLarge(f"HiGHS found no choice for {problem.name} in {time_limit} s.", "Allow more time.")
    bound = min(bound, best_cost)
    optimal = bound >= best_cost - 1e-9 * abs(best_cost)
    return Solution(best, best_cost, best_cost if optimal else bound, optimal, time.perf_counter() - started)


class _Rows:
    """Which critical times have their row in the program already, and how to add more."""

    def __init__(self, problem: Problem, program: _Program) -> None:
        self.problem, self.program = problem, program
        self.limit = float(problem.usage_limit) if problem.usage_limit is not None else np.inf
        self.timeline = critical_times(problem) if problem.limited else None
        self.scale = max(1.0, self.limit / 1e4)
        self.added: set[int] = set()

    def usage(self, amounts: list[float]) -> np.ndarray:
        """Usage at every critical time when each entry holds the given amount."""
        assert self.timeline is not None
        change = np.zeros(len(self.timeline.times) + 1)
        np.add.at(change, self.timeline.first, amounts)
        np.add.at(change, self.timeline.last, np.negative(amounts))
        return np.cumsum(change)[:-1]

    def widest(self, most: int) -> np.ndarray:
        """The times at which the limit can be exceeded furthest."""
        if self.timeline is None:
            return np.zeros(0, dtype=np.int64)
        finite = [np.isfinite(cost) for cost in self.problem.costs]
        largest = self.usage([float(u.amounts[finite[u.node]].max(initial=0.0)) for u in self.problem.usages])
        order = np.argsort(-largest, kind="stable")[:most]
        return order[largest[order] > self.limit]

    def broken(self, choice: np.ndarray) -> np.ndarray:
        """The times at which a choice exceeds the limit most, of those without a row."""
        if self.timeline is None:
            return np.zeros(0, dtype=np.int64)
        usage = self.usage([float(u.amounts[choice[u.node]]) for u in self.problem.usages])
        usage[list(self.added)] = 0.0
        order = np.argsort(-usage, kind="stable")[:ROWS_PER_TURN]
        return order[usage[order] > self.limit + tolerance(self.limit)]

    def add(self, solver: Any, points: np.ndarray) -> None:
        """Add the rows of some critical times."""
        if self.timeline is None:
            return
        for point in points.tolist():
            self.added.add(point)
            living = np.flatnonzero((self.timeline.first <= point) & (point < self.timeline.last)).tolist()
            columns = np.concatenate(
                [np.arange(*self.program.spans[self.problem.usages[entry].node]) for entry in living]
            )
            values = np.concatenate([self.problem.usages[entry].amounts for entry in living])
            merged, where = np.unique(columns, return_inverse=True)
            summed = np.bincount(where, weights=values) / self.scale
            solver.addRow(-np.inf, self.limit / self.scale, len(merged), merged.astype(np.int32), summed)


class _Program:
    """Columns, rows and entries of the program; costs and usages scaled to a size HiGHS is comfortable with."""

    def __init__(self, problem: Problem) -> None:
        sizes = problem.sizes
        stops = np.cumsum(sizes)
        self.spans = list(zip((stops - sizes).tolist(), stops.tolist(), strict=True))
        self.costs: list[np.ndarray] = [np.concatenate(list(problem.costs))]
        self.columns = int(stops[-1])
        self.integers = self.columns
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for start, stop in self.spans:
            self._row(np.arange(start, stop), np.ones(stop - start), 1.0, 1.0)
        self.pairs: list[tuple[Edge, int, np.ndarray, np.ndarray]] = []
        for edge in problem.edges:
            self._edge(edge)
        everything = np.concatenate(self.costs)
        self.forbidden = ~np.isfinite(everything)
        largest = np.abs(everything[~self.forbidden]).max(initial=0.0)
        self.scale = float(largest) / 1e4 if largest > 0 else 1.0
        self.objective = np.where(self.forbidden, 0.0, everything / self.scale)

    def _row(self, columns: np.ndarray, values: np.ndarray, lower: float, upper: float) -> None:
        self.entries.append((np.full(len(columns), len(self.lower)), columns, values))
        self.lower.append(lower)
        self.upper.append(upper)

    def _edge(self, edge: Edge) -> None:
        first, second, matrix = self.spans[edge.first][0], self.spans[edge.second][0], edge.costs
        rows, columns = np.nonzero(np.isfinite(matrix))
        if self.columns + len(rows) > DEFAULT_VARIABLES:
            raise TooLarge(f"The integer program has more than {DEFAULT_VARIABLES} variables.", "Use another method.")
        self.pairs.append((edge, self.columns, rows, columns))
        pairs = self.columns + np.arange(len(rows))
        self.columns += len(rows)
        self.costs.append(matrix[rows, columns])
        for index, start, count in ((rows, first, matrix.shape[0]), (columns, second, matrix.shape[1])):
            for option in range(count):
                members = pairs[index == option]
                self._row(np.append(members, start + option), np.append(np.ones(len(members)), -1.0), 0.0, 0.0)

    def columns_of(self, choice: np.ndarray) -> np.ndarray:
        """The values of all columns under a choice."""
        values = np.zeros(self.columns)
        for (start, _), pick in zip(self.spans, choice, strict=True):
            values[start + pick] = 1.0
        for edge, start, rows, columns in self.pairs:
            values[start + np.flatnonzero((rows == choice[edge.first]) & (columns == choice[edge.second]))] = 1.0
        return values

    def model(self, highspy: Any) -> Any:
        rows = np.concatenate([entry[0] for entry in self.entries])
        columns = np.concatenate([entry[1] for entry in self.entries])
        values = np.concatenate([entry[2] for entry in self.entries])
        order = np.argsort(columns, kind="stable")
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = self.columns, len(self.lower)
        program.col_cost_ = self.objective
        program.col_lower_ = np.zeros(self.columns)
        program.col_upper_ = np.where(self.forbidden, 0.0, 1.0)
        program.row_lower_, program.row_upper_ = np.array(self.lower), np.array(self.upper)
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        program.a_matrix_.start_ = np.searchsorted(columns[order], np.arange(self.columns + 1)).astype(np.int32)
        program.a_matrix_.index_ = rows[order].astype(np.int32)
        program.a_matrix_.value_ = values[order].astype(float)
        kinds = [highspy.HighsVarType.kInteger] * self.integers
        program.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (self.columns - self.integers)
        return program
