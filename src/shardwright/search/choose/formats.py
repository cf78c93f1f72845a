"""Reads and writes choice problems in the JSON of the 2025 contest on intra-operator parallelism, plain or gzipped.

Costs of 10^18 and more are the format's way to say *forbidden* and become ``inf``; usages of that size are plain numbers.
Equal edge matrices become one object. Files without usages (PaSE's cost tables) give problems without a limit. A node with
several usage intervals, which the contest does not know, is written with a list of intervals and a list of usage lists.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shardwright.errors import ProblemError
from shardwright.files import read_json, write
from shardwright.records import read_record, shown
from shardwright.search.choose.problem import Edge, Problem, Usage

FORBIDDEN = 10**18
LARGEST = 1e308  # stands for an infinite amount, which JSON does not have


def read_problem(path: str | Path) -> Problem:
    """Read a problem file; anything that is not one is a `ProblemError` of one sentence.

    >>> read_problem("no-such-file.json")
    Traceback (most recent call last):
        ...
    shardwright.errors.ProblemError: Cannot read 'no-such-file.json': No such file or directory. Check the path.
    """
    path = Path(path)
    where = f"{path} is not a choice problem"
    content = read_json(path, ProblemError)
    file = read_record(_File, content, where=where, error=ProblemError, remedy="Give one in the contest's format.")
    try:
        return _parse(file.problem, path.name)
    except ValueError as error:
        raise ProblemError(f"{where}: {error}.", "Give one in the contest's format.") from None


@dataclass(frozen=True)
class _Nodes:
    """One list of intervals a node, or one interval; its amounts likewise."""

    others_allowed: ClassVar[bool] = True
    costs: tuple[Any, ...]
    intervals: tuple[tuple[Any, ...], ...]
    usages: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class _Edges:
    others_allowed: ClassVar[bool] = True
    nodes: tuple[tuple[int, int], ...]
    costs: tuple[Any, ...]


@dataclass(frozen=True)
class _Content:
    others_allowed: ClassVar[bool] = True
    nodes: _Nodes
    edges: _Edges
    usage_limit: int | float | None = None
    name: str = ""


@dataclass(frozen=True)
class _File:
    others_allowed: ClassVar[bool] = True
    problem: _Content


def write_problem(problem: Problem, path: str | Path) -> None:
    """Write a problem so that `read_problem` gives it back; ``.gz`` compresses.

    Example: ``write_problem(problem, "problem.json.gz")``
    """
    path = Path(path)
    intervals: list[list[list[int]]] = [[] for _ in problem.costs]
    usages: list[list[list[float]]] = [[] for _ in problem.costs]
    for usage in problem.usages:
        intervals[usage.node].append([int(usage.start), int(usage.stop)])
        usages[usage.node].append([_whole_if_possible(min(v, LARGEST)) for v in usage.amounts.tolist()])
    single = all(len(entry) <= 1 for entry in intervals)
    content: dict[str, Any] = {
        "name": problem.name,
        "nodes": {
            "intervals": [(e[0] if e else [0, 0]) for e in intervals] if single else intervals,
            "costs": [_numbers(cost) for cost in problem.costs],
            "usages": [(u[0] if u else [0] * len(c)) for u, c in zip(usages, problem.costs, strict=True)]
            if single
            else usages,
        },
        "edges": {
            "nodes": [[int(edge.first), int(edge.second)] for edge in problem.edges],
            "costs": [_numbers(edge.costs.ravel()) for edge in problem.edges],
        },
        "usage_limit": None if problem.usage_limit is None else _whole_if_possible(min(problem.usage_limit, LARGEST)),
    }
    data = json.dumps({"problem": content}).encode()
    write(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _whole_if_possible(value: float) -> float | int:
    value = float(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _numbers(values: np.ndarray) -> list[float]:
    return [FORBIDDEN if value >= FORBIDDEN else _whole_if_possible(value) for value in values.tolist()]


def _vector(values: Any) -> np.ndarray:
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise ValueError(f"expected a list of numbers, found {shown(values)}")
    try:
        vector = np.array(values, dtype=np.float64)
    except OverflowError:  # whole numbers beyond every float
        vector = np.array([float(value) if abs(value) < FORBIDDEN else np.inf for value in values])
    if np.isnan(vector).any() or (vector == -np.inf).any():
        raise ValueError(f"expected numbers, found {shown(values)}")
    return vector


def _costs(values: Any) -> np.ndarray:
    vector = _vector(values)
    if (vector <= -FORBIDDEN).any():
        raise ValueError(f"costs of -10^18 and less cannot be told apart, found {shown(values)}")
    vector[vector >= FORBIDDEN] = np.inf
    return vector


def _amounts(values: Any) -> np.ndarray:
    """Amounts of memory; here a huge number is a huge number and forbids nothing."""
    vector = _vector(values)
    if (vector < 0).any():
        raise ValueError(f"usages cannot be negative, found {shown(values)}")
    return vector


def _span(interval: Any, node: int) -> tuple[int, int]:
    if len(interval) != 2 or not all(type(time) is int and abs(time) < 2**62 for time in interval):
        raise ValueError(f"interval {shown(interval)} of node {node} is not [start, stop)")
    return interval[0], interval[1]


def _parse(content: _Content, fallback_name: str) -> Problem:
    nodes, edges = content.nodes, content.edges
    shared: dict[object, np.ndarray] = {}

    def intern(vector: np.ndarray) -> np.ndarray:
        return shared.setdefault(vector.tobytes(), vector)

    costs = [intern(_costs(values)) for values in nodes.costs]
    if len(nodes.intervals) != len(costs) or len(nodes.usages) != len(costs):
        raise ValueError(
            f"{len(costs)} costs, {len(nodes.intervals)} intervals and {len(nodes.usages)} usages differ in number"
        )
    usages = []
    for node, (interval, amount) in enumerate(zip(nodes.intervals, nodes.usages, strict=True)):
        several = not interval or isinstance(interval[0], list)
        pairs = zip(interval, amount, strict=True) if several else [(interval, list(amount))]
        for given, values in pairs:
            start, stop = _span(given if isinstance(given, list | tuple) else [given], node)
            if start < stop:
                usages.append(Usage(node, start, stop, intern(_amounts(values))))
    if len(edges.nodes) != len(edges.costs):
        raise ValueError(f"{len(edges.nodes)} edges but {len(edges.costs)} edge cost lists")
    matrices: dict[tuple[int, int], np.ndarray] = {}
    joined = []
    for number, ((first, second), values) in enumerate(zip(edges.nodes, edges.costs, strict=True)):
        if not (0 <= first < len(costs) and 0 <= second < len(costs)):
            raise ValueError(f"edge {number} joins nodes {first} and {second} of {len(costs)}")
        flat, rows, columns = intern(_costs(values)), len(costs[first]), len(costs[second])
        if len(flat) != rows * columns:
            raise ValueError(f"edge {number} has {len(flat)} costs, expected {rows} x {columns}")
        key = (id(flat), columns)
        joined.append(Edge(first, second, matrices.setdefault(key, flat.reshape(rows, columns))))
    limit = content.usage_limit
    if limit is not None and limit < 0:
        raise ValueError(f"its usage limit of {limit} is negative")
    return Problem(
        costs, joined, usages, float(limit) if usages and limit is not None else None, content.name or fallback_name
    )
