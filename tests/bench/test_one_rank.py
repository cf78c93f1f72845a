"""The benchmarks of one rank must run at the first try on the machine they are carried to: here they run at a tiny size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"


def run(*arguments: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_twin_of_parallelize_module(tmp_path):
    out = tmp_path / "rows.json"
    asked = ("--tiny", "--variants", "tp", "sp", "--modes", "eager", "--repeats", "1", "-o", str(out))
    run(str(BENCH / "rank_native.py"), "measure", *asked)
    rows = json.loads(out.read_text())["rows"]
    assert [row["variant"] for row in rows] == ["tp", "sp"]
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["ours_seconds"] > 0 and row["native_seconds"] > 0


def test_ranks_of_accuracy(tmp_path):
    out = tmp_path / "rows.json"
    run(str(BENCH / "accuracy_ranks.py"), "measure", "--tiny", "-o", str(out))
    rows = json.loads(out.read_text())
    assert [row["case"][1] for row in rows] == ["gpt:small", "bert:small"]
    for row in rows:  # BERT has tables of two rows: its inputs must be its own, not any small integers
        assert "error" not in row, row["error"]
        assert all(wall > 0 and stick > 0 for wall, stick in row["repeats"])
