"""doctor, cache and tour: what they find, what they refuse, what they leave behind."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from shardwright.cli import app, main
from shardwright.errors import RunError
from shardwright.plans import Plan
from shardwright.reports import machine


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_doctor_finds_this_machine_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "doctor", "--no-processes", "--json") == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["PyTorch"]["fine"] and checks["solvers"]["fine"] and "two processes" not in checks


def test_doctor_says_what_is_wrong_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.__version__", "1.13.1")
    monkeypatch.setitem(sys.modules, "highspy", None)  # importing it raises

    def refuse(*_: Any, **__: Any) -> None:
        raise RunError("Rank 1 did not answer.", "")

    monkeypatch.setattr("shardwright.runtime.launch.run_locally", refuse)
    assert run(monkeypatch, "doctor") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Install torch 2.11 to 2.13" in said
    assert "highspy" in said and "pip install -c constraints.txt highspy" in said
    assert "Rank 1 did not answer" in said and "loopback" in said
    assert "Something is wrong" in said


def test_two_processes_meet() -> None:
    check = machine._together()
    assert check.fine and "added" in check.found


def test_the_cache_is_shown_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    rule, calibration = tmp_path / "probed" / "a.json", tmp_path / "local-2-of-4-cores.toml"
    kernel, other = tmp_path / "compiled" / "place" / "ideals.nbc", tmp_path / "notes.txt"
    for file in (rule, calibration, kernel, other):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    assert run(monkeypatch, "cache", "--json") == 0
    assert [c["files"] for c in json.loads(capsys.readouterr().out)["caches"]] == [1, 1, 1]
    assert run(monkeypatch, "cache", "clear") == 0
    assert not any(file.exists() for file in (rule, calibration, kernel)) and other.exists()  # nothing but what is ours
    assert run(monkeypatch, "cache", "empty") == 2


def test_a_tour_plans_shows_and_verifies_one_s_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\ndef build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))\n"
        "    return model, (torch.ones(8, 16),), {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwright.cluster.calibrate.ensure_local", lambda *_, **__: False)
    answers = [
        "yours.py:build",
        "mine.py:build",
        "8xNothing",
        "2xH100",
        "",
    ]  # two that mean nothing are asked for again
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(answers) + "\n"))
    assert run(monkeypatch, "tour") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("Which model") == said.count("Which cluster") == 2
    folder = tmp_path / "shardwright-tour"
    assert "At a glance" in (folder / "plan.html").read_text()
    assert Plan.load(folder / "local.json").devices == 2  # also where one device would be faster
    assert "is a verified plan of mine.py:build" in said


def test_shells_can_complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_SHARDWRIGHT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "shardwright do")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        get_command(app).main(args=[], prog_name="shardwright")
    assert capsys.readouterr().out.split() == ["doctor"]
