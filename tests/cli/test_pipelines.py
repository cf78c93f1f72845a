"""Pipelines on the command line: planned, simulated, explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_commands import run

MODEL = "gpt:layers=2,width=32,heads=2,vocab=97,seq=16,batch=4"


def test_a_pipeline_is_planned_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, trace = str(tmp_path / "plan.json"), tmp_path / "trace.json"
    asked = ("--stages", "2", "--microbatches", "4", "--schedule", "zb-h1", "--cut", "blocks.1")
    assert run(monkeypatch, "plan", MODEL, "--cluster", "2xH100", *asked, "-o", plan) == 0
    shown = capsys.readouterr().out
    assert "2 stages, 4 micro-batches" in shown
    assert "bubble" in shown and "one mesh" in shown and "zero-2" in shown  # what runs without stages, beside it
    assert run(monkeypatch, "simulate", plan, "--json", "--trace", str(trace)) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["bubble"] < 1
    assert len(told["ranks"]) == len(told["stages"]) == 2 and told["sent_bytes"] > 0
    assert told["peak_bytes"] == max(rank["peak_bytes"] for rank in told["ranks"])
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    # Passes, bubbles, and what follows the last pass fill the step of every device.
    for device in range(2):
        mine = [event for event in spans if event["pid"] == device and event["tid"] < 2]
        assert sum(event["dur"] for event in mine) == pytest.approx(told["step_seconds"] * 1e6)
        assert {"bubble", "forward", "reduction of gradients", "update"} <= {event["cat"] for event in mine}
    assert sum(event["cat"] == "parcel" for event in spans) == 8
    assert run(monkeypatch, "explain", plan) == 0
    assert "exposed" in capsys.readouterr().out
    assert run(monkeypatch, "explain", plan, "--memory", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["ranks"]
    assert [row["peak_bytes"] for row in rows] == [rank["peak_bytes"] for rank in told["ranks"]]
    assert all(0.9 * row["allocated_bytes"] < sum(row["breakdown"].values()) <= row["allocated_bytes"] for row in rows)
    assert run(monkeypatch, "explain", plan, "--memory") == 0
    shown = capsys.readouterr().out
    assert "micro-batch" in shown and "The largest things alive then" in shown
    assert run(monkeypatch, "explain", plan, "--program", "--rank", "1", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["instructions"]
    assert [row["kind"] for row in rows].count("receive") == 4
    assert run(monkeypatch, "simulate", plan, "--microbatches", "2", "--link-rate", "stages=0.01", "--json") == 0
    other = json.loads(capsys.readouterr().out)
    assert other["microbatches"] == 2 and other["step_seconds"] != told["step_seconds"]
    assert run(monkeypatch, "simulate", plan, "--link-rate", "gpu=2") == 2  # stages of one device each
    assert "'gpu'" in capsys.readouterr().err
    for suffix in ("svg", "pdf"):
        drawn = tmp_path / f"plan.{suffix}"
        assert run(monkeypatch, "report", plan, "-o", str(drawn)) == 0
        assert b"micro-batch" in drawn.read_bytes()
    capsys.readouterr()
    assert run(monkeypatch, "explain", plan, "--json") == 0
    operators = json.loads(capsys.readouterr().out)["operators"]
    assert {row["stage"] for row in operators} == {0, 1}
    assert run(monkeypatch, "explain", plan, operators[0]["operator"], "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["stage"] == 0
    assert run(monkeypatch, "diff", plan, plan, "--json") == 0
    assert json.loads(capsys.readouterr().out)["difference_seconds"] == 0


def test_other_numbers_of_microbatches_of_one_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The batch in one go, and in two halves: the same document, of the same strategy."""
    plan = str(tmp_path / "plan.json")
    assert run(monkeypatch, "plan", MODEL, "--cluster", "2xH100", "--search", "fsdp", "--all-devices", "-o", plan) == 0
    capsys.readouterr()
    documents = []
    for count in ("1", "2"):
        assert run(monkeypatch, "simulate", plan, "--microbatches", count, "--json") == 0
        documents.append(json.loads(capsys.readouterr().out))
    once, twice = documents
    assert once.keys() == twice.keys() and len(once["stages"]) == len(once["ranks"]) == 1
    assert (once["schedule"], twice["schedule"]) == (["0F0 0B0"], ["0F0 0B0 0F1 0B1"])
    assert twice["step_seconds"] > once["step_seconds"]
    gathers = [
        {row["collective"]: row["times"] for row in document["stages"][0]["communication"]} for document in documents
    ]
    assert gathers[1]["all_gather"] == 2 * gathers[0]["all_gather"]
    assert run(monkeypatch, "simulate", plan, "--microbatches", "3") == 2
    assert "Micro-batches of 2 or 1 rows" in capsys.readouterr().err
    assert run(monkeypatch, "simulate", plan, "--microbatches", "2") == 0
    assert "1 stage, 2 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--schedule", "1f1b"),
        ("--stages", "2", "--microbatches", "some"),
        ("--stages", "2", "--microbatches", "2", "--schedule", "2f2b"),
        ("--stages", "0"),
        ("--stages", "3", "--cut", "blocks.1"),
    ],
)
def test_what_means_nothing_is_one_sentence(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", MODEL, "--cluster", "2xH100", *arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) < 8
