"""``shardwright simulate`` and ``shardwright explain --memory`` on a plan file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli import app

run = CliRunner()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    made = run.invoke(app, ["plan", "gpt:small", "--cluster", "4xH200", "--search", "data-parallel", "-o", str(path)])
    assert made.exit_code == 0, made.output
    return path


def test_simulate_prints_what_the_plan_promised(plan: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    ran = run.invoke(app, ["simulate", str(plan), "--trace", str(trace), "--json"])
    assert ran.exit_code == 0, ran.output
    shown, promised = json.loads(ran.stdout), json.loads(plan.read_text())["prediction"]
    assert shown["step_seconds"] == pytest.approx(promised["step_seconds"])
    assert shown["peak_bytes"] == pytest.approx(promised["memory_bytes"])
    assert shown["lower_bound_seconds"] <= shown["step_seconds"]
    assert json.loads(trace.read_text())["traceEvents"]
    table = run.invoke(app, ["simulate", str(plan)])
    assert table.exit_code == 0 and "share of the step" in table.stdout


def test_explain_memory_lists_the_ten_largest_things(plan: Path) -> None:
    ran = run.invoke(app, ["explain", str(plan), "--memory", "--json"])
    assert ran.exit_code == 0, ran.output
    (shown,) = json.loads(ran.stdout)["ranks"]
    assert len(shown["largest"]) == 10
    sizes = [thing["bytes"] for thing in shown["largest"]]
    assert sizes == sorted(sizes, reverse=True)
    assert any(thing["module"].startswith("blocks.") for thing in shown["largest"])
    assert shown["allocated_bytes"] == max(size for _, size in shown["curve"])
    assert 0.99 * shown["allocated_bytes"] < sum(shown["breakdown"].values()) <= shown["allocated_bytes"]  # rounding
    table = run.invoke(app, ["explain", str(plan), "--memory"])
    assert table.exit_code == 0 and "The largest things alive then" in table.stdout
