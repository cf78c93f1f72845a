"""Published joint problems by their files: which reader a file belongs to, and its solution as rows for people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.published.aceso import check, read_aceso, solve_aceso
from bench.published.anytime import within
from bench.published.galvatron import read_galvatron, solve_galvatron
from bench.published.piper import read_piper, solve_piper, stage_rows
from bench.published.reading import read_source
from shardwright.errors import ProblemError


@dataclass(frozen=True)
class JointReport:
    """A solved problem: its cost in seconds (of what), the proof, and the stages as rows."""

    name: str
    kind: str
    measure: str
    cost: float
    lower_bound: float
    optimal: bool
    gap: float
    seconds: float
    stages: tuple[dict[str, Any], ...]


def solve_file(
    path: str | Path,
    *,
    devices: int | None = None,
    memory: float | None = None,
    bandwidth: float | None = None,
    model: str | None = None,
    time_limit: float | None = None,
) -> JointReport:
    """Read a published problem of any known kind and solve it; sizes are in bytes.

    After ``time_limit`` seconds the best found so far is the answer, with its bound.

    >>> solve_file("galvatron_llama28.json").optimal  # doctest: +SKIP
    True
    """
    name = Path(path).stem
    data = read_source(path, model)
    keys = set(data) if isinstance(data, dict) else set()
    if {"nodes", "edges", "mbsInBatch"} <= keys:
        piper = read_piper(data, devices=devices, memory=memory, bandwidth=bandwidth, name=name)
        found = within(time_limit, solve_piper, piper)
        return _report(name, "Piper", "time per sample", found, stage_rows(piper, found.answer))
    _refuse(name, devices=devices, memory=memory, bandwidth=bandwidth)
    if {"pipelines", "microbatches"} <= keys:
        tables = read_galvatron(data)
        choice = within(time_limit, solve_galvatron, tables)
        rows = [
            {
                "pipeline": choice.answer.pipeline,
                "layers": ", ".join(f"{count} × {way}" for way, count in layers),
                "ends": "tp {} sp {} zero {}".format(*choice.answer.ends),
                "largest_degree": choice.answer.largest_degree,
                "memory_mb": megabytes,
            }
            for layers, megabytes in zip(choice.answer.layers, choice.answer.memory_mb, strict=True)
        ]
        return _report(tables.name, "Galvatron", "seconds per step", choice, rows)
    if {"models", "bandwidth_gb_per_s_within_node"} <= keys:
        aceso = read_aceso(data, model)
        plan = within(time_limit, solve_aceso, aceso)
        _, memory_mb = check(aceso, plan.answer)
        rows = [
            {
                "operators": f"{stage.start}–{stage.end - 1}",
                "devices": stage.tp * stage.dp,
                "tp": stage.tp,
                "dp": stage.dp,
                "recomputed": sum(stage.recompute),
                "memory_mb": megabytes,
                "microbatch": plan.answer.microbatch,
                "recompute": "".join("01"[flag] for flag in stage.recompute),
            }
            for stage, megabytes in zip(plan.answer.stages, memory_mb, strict=True)
        ]
        return _report(f"{name} {aceso.name}", "Aceso", "seconds per step", plan, rows)
    raise ProblemError(
        f"{path} is no joint problem that is known.", "Known are the formats of Piper, Galvatron (tables) and Aceso."
    )


def _report(name: str, kind: str, measure: str, found: Any, rows: list[dict[str, Any]]) -> JointReport:
    return JointReport(
        name, kind, measure, found.cost, found.lower_bound, found.optimal, found.gap, found.seconds, tuple(rows)
    )


def _refuse(name: str, **given: Any) -> None:
    for key, value in given.items():
        if value is not None:
            raise ProblemError(f"{name} says itself what --{key} is.", f"Leave --{key} out.")


__all__ = ["JointReport", "solve_file"]
