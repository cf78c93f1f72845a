"""Choosing one option for every node: exact where possible, with a proved bound everywhere."""

from shardwright.search.choose.formats import read_problem, write_problem
from shardwright.search.choose.problem import Edge, Evaluation, Problem, Usage, evaluate, usage_over_time
from shardwright.search.choose.solve import METHODS, frontier, solve

__all__ = [
    "METHODS",
    "Edge",
    "Evaluation",
    "Problem",
    "Usage",
    "evaluate",
    "frontier",
    "read_problem",
    "solve",
    "usage_over_time",
    "write_problem",
]
