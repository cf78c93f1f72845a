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
from shardwright.search.choose.problem import Problem, evaluate
from shardwright.search.choose.timeline import critical_times
from shardwright.search.solution import Solution

DEFAULT_VARIABLES = 2_000_000


def solve_by_integer_program(
    problem: Problem, *, time_limit: float | None = None, seed: int = 0
) -> Solution[np.ndarray]:
    """The optimum by branch and cut; with a time limit the best choice so far and HiGHS's bound.

    Example: ``solve_by_integer_program(problem, time_limit=10).optimal``
    """
    import highspy

    started = time.perf_counter()
    program = _Program(problem)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("random_seed", int(seed) % 2**31)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 1e-9)
    solver.setOptionValue("mip_feasibility_tolerance", 1e-9)
    solver.setOptionValue("primal_feasibility_tolerance", 1e-9)
    if time_limit is not None:
        solver.setOptionValue("time_limit", float(time_limit))
    solver.passModel(program.model(highspy))
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        raise Infeasible(f"No choice of {problem.name} keeps its limit of {problem.usage_limit}.", "Raise the limit.")
    values = np.array(solver.getSolution().col_value)
    info = solver.getInfo()
    if len(values) == 0 or info.primal_solution_status != 2:
        raise TooLarge(f"HiGHS found no choice for {problem.name} in {time_limit} s.", "Allow more time.")
    choice = np.array([int(np.argmax(values[start:stop])) for start, stop in program.spans], dtype=np.int64)
    cost, peak, feasible = evaluate(problem, choice)
    if not feasible:
        raise TooLarge(f"HiGHS's choice for {problem.name} breaks the limit by rounding ({peak}).", "Rescale usages.")
    proved = status == highspy.HighsModelStatus.kOptimal
    bound = cost if proved else min(cost, float(info.mip_dual_bound) * program.scale)
    return Solution(choice, cost, bound, proved or bound >= cost, time.perf_counter() - started)


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
        for first, second, matrix in problem.edges:
            self._edge(self.spans[first][0], self.spans[second][0], matrix)
        if problem.limited:
            self._usage(problem)
        everything = np.concatenate(self.costs)
        self.forbidden = ~np.isfinite(everything)
        largest = np.abs(everything[~self.forbidden]).max(initial=0.0)
        self.scale = float(largest) / 1e4 if largest > 1e6 else 1.0
        self.objective = np.where(self.forbidden, 0.0, everything / self.scale)

    def _row(self, columns: np.ndarray, values: np.ndarray, lower: float, upper: float) -> None:
        self.entries.append((np.full(len(columns), len(self.lower)), columns, values))
        self.lower.append(lower)
        self.upper.append(upper)

    def _edge(self, first: int, second: int, matrix: np.ndarray) -> None:
        rows, columns = np.nonzero(np.isfinite(matrix))
        if self.columns + len(rows) > DEFAULT_VARIABLES:
            raise TooLarge(f"The integer program has more than {DEFAULT_VARIABLES} variables.", "Use another method.")
        pairs = self.columns + np.arange(len(rows))
        self.columns += len(rows)
        self.costs.append(matrix[rows, columns])
        for index, start, count in ((rows, first, matrix.shape[0]), (columns, second, matrix.shape[1])):
            for option in range(count):
                members = pairs[index == option]
                self._row(np.append(members, start + option), np.append(np.ones(len(members)), -1.0), 0.0, 0.0)

    def _usage(self, problem: Problem) -> None:
        timeline = critical_times(problem)
        scale = max(1.0, float(problem.usage_limit or 0.0) / 1e4)
        for point in range(len(timeline.times)):
            living = np.flatnonzero((timeline.first <= point) & (point < timeline.last)).tolist()
            columns = np.concatenate([np.arange(*self.spans[problem.usages[entry].node]) for entry in living])
            values = np.concatenate([problem.usages[entry].amounts for entry in living])
            merged, where = np.unique(columns, return_inverse=True)
            summed = np.bincount(where, weights=values)
            self._row(merged, summed / scale, -np.inf, float(problem.usage_limit or 0.0) / scale)

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
