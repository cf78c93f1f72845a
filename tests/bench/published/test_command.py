from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.published.__main__ import app
from typer.testing import CliRunner

from shardwright.errors import ProblemError

DATA = Path(__file__).parents[2] / "data" / "joint"
CHUNKS8 = "llama-28-layers-seq8192-chunks8"


def test_a_published_problem_as_json_and_as_a_table() -> None:
    arguments = ["joint", str(DATA / "bert32a100.json"), "--devices", "8", "--memory", "80", "--bandwidth", "25"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    found = json.loads(result.stdout)
    assert found["cost"] == pytest.approx(0.1220073, rel=1e-6)
    assert found["optimal"]
    shown = CliRunner().invoke(app, arguments).stdout
    assert "0.1220073" in shown and "optimal" in shown


def test_galvatron_by_its_file() -> None:
    result = CliRunner().invoke(app, ["joint", str(DATA / "galvatron_llama28.json"), "--model", CHUNKS8, "--json"])
    assert 64 / json.loads(result.stdout)["cost"] == pytest.approx(2.5246283459)


def test_an_option_that_does_not_apply_and_a_file_that_is_no_problem(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["joint", str(DATA / "galvatron_llama28.json"), "--model", CHUNKS8, "--devices", "4"]
    )
    assert isinstance(result.exception, ProblemError)
    assert "--devices" in result.exception.remedy
    other = tmp_path / "other.json"
    other.write_text("{}")
    result = CliRunner().invoke(app, ["joint", str(other)])
    assert isinstance(result.exception, ProblemError)
