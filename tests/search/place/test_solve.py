"""The one door, the report and the command."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import ProblemError
from shardwright.search.place.formats import read_workload
from shardwright.search.place.latency import latency_violations
from shardwright.search.place.measure import violations
from shardwright.search.place.problem import Rules
from shardwright.search.place.report import limiting, stage_rows
from shardwright.search.place.solve import place

from .test_formats import small, written
from .test_heuristics import layered

THROUGHPUT = ["auto", "exact", "order", "heuristic", "program", "local-search", "equal-shares", "one-device"]


@functools.cache
def _bound() -> float:
    return place(layered(40, 4, 3), contiguous=False, time_limit=2).lower_bound


@pytest.mark.parametrize("solver", THROUGHPUT)
def test_every_throughput_solver_answers(solver: str) -> None:
    workload = layered(40, 4, 3)
    found = place(workload, solver=solver, time_limit=2)
    assert violations(workload, found.answer, contiguous=solver not in ("program", "local-search")) == []
    assert found.cost >= _bound() - 1e-9
    rows = stage_rows(workload, found.answer)
    assert max(row.load for row in rows) == pytest.approx(found.cost)
    assert sum(row.nodes for row in rows) == workload.nodes
    assert limiting(rows).startswith("accelerator")


@pytest.mark.parametrize("solver", ["auto", "program", "heuristic", "greedy"])
def test_every_latency_solver_answers(solver: str) -> None:
    workload = layered(30, 3, 2)
    found = place(workload, "latency", solver=solver, time_limit=2)
    assert latency_violations(workload, found.answer) == []
    assert found.lower_bound <= found.cost


def test_falls_back_where_there_are_too_many_ideals() -> None:
    workload = layered(400, 40, 4)
    found = place(workload)
    assert violations(workload, found.answer) == []
    assert not found.optimal and 0 < found.gap < 0.5


def test_names_what_it_does_not_know() -> None:
    workload = layered(8, 2, 2)
    with pytest.raises(ProblemError, match="objective 'speed'"):
        place(workload, "speed")
    with pytest.raises(ProblemError, match="solver 'magic'"):
        place(workload, solver="magic")
    with pytest.raises(ProblemError, match="latency counts one sample"):
        place(workload, "latency", rules=Rules(overlap=True))


def test_command_prints_json(tmp_path: Path) -> None:
    path = written(tmp_path, small())
    result = CliRunner().invoke(app, ["place", str(path), "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["optimal"] and data["cost"] == pytest.approx(20.0)  # node 9 runs on the CPU only
    assert data["limiting"] == "cpu 0 (computing)"
    assert sum(stage["nodes"] for stage in data["stages"]) == 2
    assert list(data["placement"]) == ["0 7", "1 b"]
    assert violations(read_workload(path), place(read_workload(path)).answer) == []


def test_command_prints_a_table(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["place", str(written(tmp_path, small())), "--objective", "latency"])
    assert result.exit_code == 0, result.output
    assert "optimal" in result.output and "Limited by" in result.output


def test_bad_input_is_one_sentence_and_status_two(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "shardwright", "place", str(tmp_path / "none.json")], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "Cannot read" in run.stderr and "Traceback" not in run.stderr
