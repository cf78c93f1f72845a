"""Predictions for the single-device cases, beside what was measured: the table of ``docs/accuracy.md``."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accuracy_cases import Case
from accuracy_sessions import spread
from shardwright.cluster import Mesh, mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators.rules import Replicate
from shardwright.operators.strategy import Strategy
from shardwright.simulator import Timeline, simulate
from shardwright.zoo.reference import resolve


@dataclass(frozen=True)
class Compared:
    """One case: measured and predicted seconds and bytes."""

    case: Case
    measured: dict[str, Any]
    timeline: Timeline

    @property
    def time_error(self) -> float:
        return self.timeline.seconds / self.measured["seconds"] - 1

    @property
    def memory_error(self) -> float:
        return self.timeline.peak_bytes / self.measured["peak_bytes"] - 1


def whole(graph: Graph, mesh: Mesh) -> Strategy:
    """Everything on one device."""
    rest = (Replicate(),) * len(mesh.axes)
    splits = {op.name: (None,) * len(mesh.axes) for op in graph.ops}
    return Strategy(mesh.names, splits, dict.fromkeys(graph.sources, rest))


def predict(case: Case, mesh: Mesh) -> Timeline:
    """Capture the case's model on meta tensors and simulate one step."""
    resolved = resolve(case.reference, batch=case.batch, seq=case.seq, device="meta", dtype=case.dtype)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    return simulate(graph, whole(graph, mesh), mesh)


def compare(path: Path, cluster: str = "1xH200") -> list[Compared]:
    mesh = mesh_of(parse_cluster(cluster))
    found = []
    for row in json.loads(path.read_text())["rows"]:
        if "error" in row:
            continue
        case = Case(row["reference"], row["batch"], row["dtype"], row["seq"], row["family"])
        found.append(Compared(case, row, predict(case, mesh)))
    return found


def table(rows: list[Compared]) -> str:
    """The error table in Markdown, with the medians and the worst."""
    lines = [
        "| model, batch, dtype | kind | measured ms | of sessions | predicted ms | error "
        "| measured GiB | predicted GiB | error |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        measured, timeline = row.measured, row.timeline
        lines.append(
            f"| {row.case.name} | {row.case.family} | {1e3 * measured['seconds']:.2f} "
            f"| {spread(measured['sessions'])} | {1e3 * timeline.seconds:.2f} "
            f"| {100 * row.time_error:+.1f} % | {measured['peak_bytes'] / 2**30:.2f} "
            f"| {timeline.peak_bytes / 2**30:.2f} | {100 * row.memory_error:+.1f} % |"
        )
    times, sizes = [abs(r.time_error) for r in rows], [abs(r.memory_error) for r in rows]
    lines += [
        "",
        f"Step time: median absolute error {100 * statistics.median(times):.1f} %, worst {100 * max(times):.1f} %. "
        f"Peak memory: median {100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} %, "
        f"lowest {100 * min(r.memory_error for r in rows):+.1f} %.",
    ]
    return "\n".join(lines)


def main(path: Path) -> None:
    print(table(compare(path)))
