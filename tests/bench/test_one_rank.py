"""The benchmarks of one rank must run at the first try on the machine they are carried to: here they run at a tiny size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import accuracy_ranks
import device_models
import rank_native


def test_twin_of_parallelize_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are measured in processes of their own, as they are there."""
    out = tmp_path / "rows.json"
    asked = ("--tiny", "--variants", "tp", "sp", "--modes", "eager", "--repeats", "1", "-o", str(out))
    monkeypatch.setattr(sys, "argv", ["rank_native.py", "measure", *asked])
    rank_native.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["variant"] for row in rows] == ["tp", "sp"]
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["ours_seconds"] > 0 and row["native_seconds"] > 0


def test_ranks_of_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    asked = ("--tiny", "--repeats", "2", "-o", str(out))
    monkeypatch.setattr(sys, "argv", ["accuracy_ranks.py", "measure", *asked])
    accuracy_ranks.main()
    rows = json.loads(out.read_text())
    assert [row["case"][1] for row in rows] == ["gpt:small", "bert:small"]
    for row in rows:  # BERT has tables of two rows: its inputs must be its own, not any small integers
        assert "error" not in row, row["error"]
        assert all(wall > 0 and stick > 0 for wall, stick in row["repeats"])
    printed = capsys.readouterr().out  # what was measured is compared with what is predicted, as there
    assert "| fsdp | gpt:small, batch 8, float32 |" in printed and "Peak memory: median" in printed


def test_models_beside_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in processes of their own, rows as they come, the rest in a later call; one that dies is a row too."""
    first, then = tmp_path / "first.jsonl", tmp_path / "then.jsonl"
    asked = ("device_models.py", "--only", "small-gpt", "--rounds", "1", "--modes")
    monkeypatch.setattr(sys, "argv", [*asked, "one", "-o", str(first)])
    device_models.main()
    monkeypatch.setattr(sys, "argv", [*asked, "one", "fsdp-eager", "-o", str(then), "--after", str(first)])
    device_models.main()
    rows = [json.loads(line) for path in (first, then) for line in path.read_text().splitlines()]
    assert [row["mode"] for row in rows] == ["one", "fsdp-eager"]
    for row in rows:
        assert "error" not in row, row
        assert all(wall > 0 for wall in row["walls"]) and row["loss"] == row["loss"]
    worker = device_models.Worker("small-gpt", "no such mode", str(tmp_path))
    assert worker.hears(120) is None and "KeyError" in worker.row["last_words"]
    printed = device_models.table([first, then])
    assert "| small-gpt |" in printed and "failed" not in printed
