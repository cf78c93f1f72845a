"""Predictions for the single-device cases, beside what was measured: the table of ``docs/benchmarks/accuracy.md``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import paced
from accuracy_cases import Case, resolved_model
from eager_attention import as_eager_runs_it
from shardwright.cluster import Mesh, mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators.rules import Replicate
from shardwright.operators.strategy import Strategy
from shardwright.simulator import Timeline, simulate


@dataclass(frozen=True)
class Row:
    """One case: measured and predicted seconds of every repeat, and bytes."""

    case: Case
    times: paced.Compared
    measured_bytes: int
    timeline: Timeline

    @property
    def memory_error(self) -> float:
        return self.timeline.stage().memory.peak / self.measured_bytes - 1


def whole(graph: Graph, mesh: Mesh) -> Strategy:
    """Everything on one device."""
    rest = (Replicate(),) * len(mesh.axes)
    splits = {op.name: (None,) * len(mesh.axes) for op in graph.ops}
    return Strategy(mesh.names, splits, dict.fromkeys(graph.sources, rest))


def predict(case: Case, mesh: Mesh, squares: bool = False) -> Timeline:
    """Capture the case's model on meta tensors and simulate one step."""
    resolved = resolved_model(case, "meta", squares)
    with as_eager_runs_it():
        graph = capture(resolved.model, resolved.args, resolved.kwargs)
    return simulate(graph, whole(graph, mesh), mesh)


def compare(path: Path, cluster: str = "1xH200") -> list[Row]:
    mesh = mesh_of(parse_cluster(cluster))
    found = []
    for row in json.loads(path.read_text())["rows"]:
        if "error" in row:
            continue
        case = Case(row["reference"], row["batch"], row["dtype"], row["seq"], row["family"])
        timeline = predict(case, mesh)
        times = paced.compare(row["repeats"], timeline.ranks[0].events, mesh.device)
        found.append(Row(case, times, row["peak_bytes"], timeline))
    return found


def table(rows: list[Row]) -> str:
    """The error table in Markdown, with the medians and the worst."""
    lines = [
        f"| model, batch, dtype | kind | {paced.HEADINGS} | measured GiB | predicted GiB | error |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.case.name} | {row.case.family} | {row.times.cells} | {row.measured_bytes / 2**30:.2f} "
        f"| {row.timeline.stage().memory.peak / 2**30:.2f} | {100 * row.memory_error:+.2f} % |"
        for row in rows
    ]
    return "\n".join([*lines, "", paced.summary([r.times.error for r in rows], [r.memory_error for r in rows])])


def main(path: Path) -> None:
    print(table(compare(path)))
