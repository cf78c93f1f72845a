"""Reads and writes choice problems in the JSON of the 2025 contest on intra-operator parallelism, plain or gzipped.

Costs of 10^18 and more are the format's way to say *forbidden* and become ``inf``. Equal edge matrices become one
object. Files without usages (PaSE's cost tables) give problems without a limit. A node with several usage intervals,
which the contest does not know, is written with a list of intervals and a list of usage lists.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.errors import ProblemError
from shardwright.search.choose.problem import Edge, Problem, Usage

FORBIDDEN = 10**18


def read_problem(path: str | Path) -> Problem:
    """Read a problem file; anything that is not one is a `ProblemError` of one sentence.

    >>> read_problem("no-such-file.json")
    Traceback (most recent call last):
        ...
    shardwright.errors.ProblemError: Cannot read no-such-file.json: No such file or directory. Check the path.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        content = json.loads(data)
    except OSError as error:
        raise ProblemError(f"Cannot read {path}: {error.strerror or error}.", "Check the path.") from None
    except (ValueError, EOFError, zlib.error) as error:
        raise ProblemError(f"{path} is not JSON: {error}.") from None
    try:
        return _parse(content["problem"], path.name)
    except KeyError as error:
        raise ProblemError(f"{path} is not a choice problem: {error} is missing.") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ProblemError(f"{path} is not a choice problem: {error}.") from None


def write_problem(problem: Problem, path: str | Path) -> None:
    """Write a problem so that `read_problem` gives it back; ``.gz`` compresses.

    Example: ``write_problem(problem, "problem.json.gz")``
    """
    path = Path(path)
    intervals: list[list[list[int]]] = [[] for _ in problem.costs]
    usages: list[list[list[float]]] = [[] for _ in problem.costs]
    for usage in problem.usages:
        intervals[usage.node].append([int(usage.start), int(usage.stop)])
        usages[usage.node].append(_numbers(usage.amounts))
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
        "usage_limit": None if problem.usage_limit is None else _number(problem.usage_limit),
    }
    data = json.dumps({"problem": content}).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _number(value: float) -> float | int:
    value = float(value)
    if value >= FORBIDDEN:
        return FORBIDDEN
    return int(value) if value.is_integer() else value


def _numbers(values: np.ndarray) -> list[float]:
    return [_number(value) for value in values.tolist()]


def _vector(values: list[float]) -> np.ndarray:
    vector = np.array(values, dtype=np.float64)
    if vector.ndim != 1:
        raise ValueError(f"expected a list of numbers, found {str(values)[:60]}")
    if np.isnan(vector).any() or (vector == -np.inf).any():
        raise ValueError(f"costs must be numbers, found {str(values)[:60]}")
    vector[vector >= FORBIDDEN] = np.inf
    return vector


def _parse(content: dict[str, Any], fallback_name: str) -> Problem:
    nodes, edges = content["nodes"], content["edges"]
    shared: dict[object, np.ndarray] = {}

    def intern(values: list[float]) -> np.ndarray:
        vector = _vector(values)
        return shared.setdefault(vector.tobytes(), vector)

    costs = [intern(values) for values in nodes["costs"]]
    intervals, amounts = nodes["intervals"], nodes["usages"]
    if len(intervals) != len(costs) or len(amounts) != len(costs):
        raise ValueError(f"{len(costs)} costs, {len(intervals)} intervals and {len(amounts)} usages differ in number")
    usages = []
    for node, (interval, amount) in enumerate(zip(intervals, amounts, strict=True)):
        several = not interval or isinstance(interval[0], list)
        if not several and len(interval) != 2:
            raise ValueError(f"interval {interval} of node {node} is not [start, stop)")
        for (start, stop), values in zip(interval, amount, strict=True) if several else [(interval, amount)]:
            if start < stop:
                usages.append(Usage(node, int(start), int(stop), intern(values)))
    if len(edges["nodes"]) != len(edges["costs"]):
        raise ValueError(f"{len(edges['nodes'])} edges but {len(edges['costs'])} edge cost lists")
    matrices: dict[tuple[int, int], np.ndarray] = {}
    joined = []
    for number, (ends, values) in enumerate(zip(edges["nodes"], edges["costs"], strict=True)):
        first, second = ends
        if not (0 <= first < len(costs) and 0 <= second < len(costs)):
            raise ValueError(f"edge {number} joins nodes {first} and {second} of {len(costs)}")
        flat, rows, columns = intern(values), len(costs[first]), len(costs[second])
        if len(flat) != rows * columns:
            raise ValueError(f"edge {number} has {len(flat)} costs, expected {rows} x {columns}")
        key = (id(flat), columns)
        joined.append(Edge(first, second, matrices.setdefault(key, flat.reshape(rows, columns))))
    limit = content.get("usage_limit")
    return Problem(
        costs,
        joined,
        usages,
        float(limit) if usages and limit is not None else None,
        content.get("name", fallback_name),
    )
