"""``shardwright schedule`` as a user meets it."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from shardwright.cli import main
from shardwright.schedules import known_schedule, read_csv


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwright", "schedule", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


SMALL = (
    "--stages",
    "4",
    "--microbatches",
    "12",
    "--forward",
    "5",
    "--backward",
    "6",
    "--weight",
    "4",
    "--backward-memory=-0.5",
)


def test_search_under_a_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The published scheduler's 193 at this limit, proved optimal; the CSV holds the same orders."""
    assert _run(monkeypatch, *SMALL, "--memory", "5", "--json", "--csv", str(tmp_path / "found.csv")) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["span"], shown["lower_bound"], shown["optimal"]) == (193.0, 193.0, True)
    assert all(device["peak_memory"] <= 5 for device in shown["devices"])
    assert [" ".join(map(str, order)) for order in read_csv(tmp_path / "found.csv").orders] == shown["orders"]
    assert _run(monkeypatch, "--schedule", str(tmp_path / "found.csv"), *SMALL[4:], "--json") == 0
    assert json.loads(capsys.readouterr().out)["span"] == 193.0


def test_known_schedule_is_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "--stages", "2", "--microbatches", "2", "--schedule", "1f1b") == 0
    shown = capsys.readouterr().out
    assert "F0-F1-......B0----...B1----" in shown
    assert "makespan 9" in shown


def test_trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every pass once as a span on its device's row, none overlapping; memory as a counter."""
    path = tmp_path / "trace.json"
    assert _run(monkeypatch, "--stages", "4", "--microbatches", "3", "--schedule", "zb-v", "--trace", str(path)) == 0
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sorted(event["name"] for event in spans) == sorted(map(str, known_schedule("zb-v", 4, 3).actions()))
    for device in (0, 1):
        mine = sorted((event["ts"], event["ts"] + event["dur"]) for event in spans if event["pid"] == device)
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))
    assert max(event["args"]["memory"] for event in events if event["ph"] == "C") == 4


def test_v_shape(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "--stages", "4", "--microbatches", "6", "--schedule", "zb-v", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [device["stages"] for device in shown["devices"]] == [[0, 3], [1, 2]]
    assert shown["orders"] == [" ".join(map(str, order)) for order in known_schedule("zb-v", 4, 6).orders]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--schedule", "zb-x"),
        ("--schedule", "missing.csv"),
        ("--schedule", "zb-v", "--stages", "3"),
        ("--schedule", "gpipe", "--memory", "4"),
        ("--forward", "fast"),
        ("--forward", "1,2"),
        ("--objective", "time"),
        ("--memory", "0.5"),
        ("--microbatches", "0"),
        ("--stages", "4", "--devices", "5"),
        ("--sizes", "1,2"),
        ("--shape", "x"),
        ("--schedule", "1f1b", "--csv", "no/such/folder/out.csv"),
        ("--schedule", "1f1b", "--trace", "no/such/folder/out.json"),
    ],
)
def test_bad_input_is_one_sentence_and_a_remedy(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, *arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("shardwright: ")
    assert len(message.strip().splitlines()) == 2
