"""Galvatron's problems (Miao et al., VLDB 2023) as tables: a pipeline degree, and a strategy for the layers and for
the ends.

The stages are given; what is chosen is the pipeline degree, one strategy for all layers and the ends, and the largest
degree G whose buffer is paid. That is few enough to try all of them by the published formula, which is the proof.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.errors import Infeasible, ProblemError
from shardwright.search.solution import Solution


@dataclass(frozen=True)
class GalvatronChoice:
    """One answer: pipeline degree, strategy (its name in the tables), largest degree, and each stage's megabytes."""

    pipeline: int
    strategy: str
    largest_degree: int
    memory_mb: tuple[float, ...]


def read_galvatron(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The tables, checked for what this module solves."""
    data: Any = source if isinstance(source, dict) else json.loads(Path(source).read_text())
    if isinstance(data, list) and len(data) == 1:
        data = data[0]
    missing = {"devices", "global_batch", "microbatches", "memory_limit_mb", "pipelines"} - set(data)
    if missing:
        raise ProblemError(
            f"the tables have no {', '.join(sorted(missing))}.", "Write them as in the published problem."
        )
    if not data.get("one_strategy_for_all_layers"):
        raise ProblemError(
            f"{data.get('name', 'the problem')} asks for a strategy per layer.",
            "Only problems with one_strategy_for_all_layers are read so far.",
        )
    return data


def solve_galvatron(data: dict[str, Any]) -> Solution[GalvatronChoice]:
    """The fastest choice that fits, by trying all of them; the cost is seconds per step."""
    started = time.perf_counter()
    best: tuple[float, GalvatronChoice] | None = None
    for pipeline in data["pipelines"]:
        for layer in pipeline["strategies"]:
            for end in pipeline["ends"]:
                if any(layer[key] != end[key] for key in ("tp", "sp", "zero")):
                    continue
                for degree in _degrees(data, pipeline, layer):
                    memory = _memory(pipeline, layer, end, degree)
                    if max(memory) > data["memory_limit_mb"]:
                        continue
                    seconds = step_seconds(pipeline, layer, end, data["microbatches"])
                    if best is None or seconds < best[0]:
                        best = seconds, GalvatronChoice(pipeline["pp"], layer["id"], degree, tuple(memory))
    if best is None:
        raise Infeasible(
            f"no strategy of {data.get('name', 'the problem')} fits into {data['memory_limit_mb']} MB.",
            "Give it more memory or more devices.",
        )
    return Solution(best[1], best[0], best[0], True, time.perf_counter() - started)


def _degrees(data: dict[str, Any], pipeline: dict[str, Any], layer: dict[str, Any]) -> list[int]:
    """The largest degrees that may be declared; without tensor parallelism there is no buffer to choose."""
    if layer["tp"] == 1:
        return [data["devices"] // pipeline["pp"]]
    return [int(g) for g in pipeline["buffer_mb"] if layer["tp"] * layer["sp"] <= int(g)]


def _memory(pipeline: dict[str, Any], layer: dict[str, Any], end: dict[str, Any], degree: int) -> list[float]:
    buffer = 0.0 if layer["tp"] == 1 else pipeline["buffer_mb"][str(degree)]
    return [
        count * layer["memory_mb_per_stage"][i] + end["memory_mb_per_stage"][i] + buffer
        for i, count in enumerate(pipeline["layers_per_stage"])
    ]


def step_seconds(pipeline: dict[str, Any], layer: dict[str, Any], end: dict[str, Any], microbatches: int) -> float:
    """The published formula: two views of the pipeline, and what of the gradient sums does not hide behind earlier
    stages.
    """
    m, stages = microbatches, pipeline["pp"]
    plain = [
        count * layer["seconds_without_sync"] + end["seconds_without_sync"][i]
        for i, count in enumerate(pipeline["layers_per_stage"])
    ]
    summed = [count * layer["seconds_with_sync"] for count in pipeline["layers_per_stage"]]
    q, rest = min(stages - 1, m - 1), sum(plain[1:])
    by_last = sum(plain) + (m - 1) * plain[-1]
    by_first = (
        max(q * plain[0] / 3, rest / 3) + max(2 * q * plain[0] / 3, 2 * rest / 3) + plain[0] * max(0, m + 1 - stages)
    )
    late = max(summed[i] - sum(plain[: i + 1]) for i in range(stages))
    return max(by_last, by_first) + max(0.0, late)
