"""``shardwright verify`` as a user calls it: a table or JSON, the exit status is the verdict."""

from __future__ import annotations

import json

import pytest

from cli.test_commands import run
from shardwright.cli import verify as command
from shardwright.runtime.compare import Comparison, Verification

AGREEING = Comparison("gradient", "w at step 1", 1e-7, 1.0, 4e-7, 1e-7)
DIFFERING = Comparison("gradient", "w at step 2", 1e-3, 1.0, 4e-7, 1e-7)


def test_two_processes_against_one(monkeypatch, capsys):
    arguments = (
        "verify",
        "rnn:small,layers=1,seq=2",
        "--cluster",
        "local:2",
        "--search",
        "fsdp",
        "--steps",
        "2",
        "--json",
    )
    assert run(monkeypatch, *arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["agrees"] is True and document["disagreeing"] == []
    assert document["processes"] == 2 and document["search"] == "fsdp"
    assert {"loss", "gradient", "update"} <= set(document["worst"])
    assert document["communication"]


@pytest.mark.parametrize("arguments", [("--dtype", "float16"), ("--search", "fsdq"), ("--plan", "missing.json")])
def test_bad_input(arguments, monkeypatch, capsys):
    assert run(monkeypatch, "verify", "gpt:small", *arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("shardwright: ") and len(message.strip().splitlines()) == 2


def test_differences_are_named(capsys):
    answer = Verification((AGREEING, DIFFERING), (1.0, 0.9), "float32", {"all_reduce": (2, 1024)})
    assert not answer.agrees
    command._print("m", "fsdp", "cpu 2", answer)
    shown = capsys.readouterr().out
    assert "DIFFER" in shown and "w at step 2" in shown and "10000.0 ×" in shown
