"""``shardwright verify`` as a user calls it: a table or JSON, the exit status is the verdict."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from cli.test_commands import run
from shardwright.cli import verify as command
from shardwright.verification import Comparison, Verification, Verified
from shardwright.verification.forced import Cut

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
    assert document["agrees"] is True and document["processes"] == 2 and document["search"] == "fsdp"
    found, *others = document["strategies"]
    assert [found["strategy"], found["dtype"], found["disagreeing"]] == ["found", "float64", []]
    assert {"loss", "output", "gradient", "update", "copy"} <= set(found["worst"])
    assert found["communication"] and found["cut"]["operators"] > 0
    assert {"batch", "features", "reductions"} <= {other["strategy"] for other in others}
    assert others[-1]["strategy"] == "found" and others[-1]["dtype"] == "float32"
    said = " ".join(document["compared"])
    assert "3 passes on 3 different batches, step 2 adds up two" in said and "recomputed" in said and "ipeline" in said


def test_stages_that_are_asked_for(monkeypatch, capsys):
    """What stages send each other is counted."""
    arguments = ("rnn:small,layers=1,seq=2", "--cluster", "local:2", "--steps", "1", "--dtype", "float64")
    asked = ("--stages", "2", "--microbatches", "2", "--schedule", "zb-h1")
    assert run(monkeypatch, "verify", *arguments, *asked, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["agrees"] is True and document["processes"] == 2 and "2 stages" in document["shape"]
    (found,) = document["strategies"]
    times, size = found["communication"]["send"]
    assert times >= 2 and size > 0  # of rank 0: its values for the second stage, in two micro-batches


def test_one_process(monkeypatch, capsys):
    assert run(monkeypatch, "verify", "rnn:small,layers=1,seq=2", "--cluster", "local:1", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["agrees"] is True and document["processes"] == 1
    assert all(run["strategy"] == "found" and run["communication"] == {} for run in document["strategies"])


def test_a_batch_smaller_than_the_devices(monkeypatch, capsys):
    arguments = ("rnn:small,layers=1,seq=2", "--batch", "1", "--search", "data-parallel", "--steps", "1")
    assert run(monkeypatch, "verify", *arguments, "--cluster", "local:2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["processes"] == 2


ODD = """
import torch

class Returns(torch.nn.Module):
    def __init__(self, what):
        super().__init__()
        self.linear, self.what = torch.nn.Linear(4, 4), what

    def forward(self, x):
        y = self.linear(x)
        return {"choice": y.argmax(-1), "nan": y.sum() / 0.0 - y.sum() / 0.0, "loss": y.sum()}[self.what]

def frozen():
    return Returns("loss").requires_grad_(False), (torch.randn(4, 4),), {}

def choice():
    return Returns("choice"), (torch.randn(4, 4),), {}

def nan():
    return Returns("nan"), (torch.randn(4, 4),), {}
"""


@pytest.mark.parametrize(
    ("function", "complaint"),
    [("frozen", "no parameter to train"), ("choice", "depends on its parameters"), ("nan", "loss of step 1 is nan")],
)
def test_nothing_to_compare(function, complaint, tmp_path, monkeypatch, capsys):
    file = tmp_path / "odd.py"
    file.write_text(ODD)
    assert run(monkeypatch, "verify", f"{file}:{function}", "--cluster", "local:1") == 2
    message = capsys.readouterr().err
    assert complaint in message and len(message.strip().splitlines()) == 2 and "defect" not in message


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dtype", "float16"),
        ("--search", "fsdq"),
        ("--plan", "missing.json"),
        ("--plan", "p.json", "--search", "fsdp"),
        ("--plan", "p.json", "--stages", "2"),
        ("--schedule", "1f1b"),
    ],
)
def test_bad_input(arguments, monkeypatch, capsys):
    assert run(monkeypatch, "verify", "gpt:small", *arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("shardwright: ") and len(message.strip().splitlines()) == 2


def answer(*comparisons: Comparison, cut: int = 3) -> Verified:
    plan = SimpleNamespace(
        search="fsdp",
        whole=True,
        devices=2,
        shape="cpu 2",
    )
    compared = Verification(
        comparisons, (1.0, 0.9), "float32", {"all_reduce": (2, 1024)}, "found", Cut(cut, 9, 0.5, {})
    )
    return Verified(plan, (compared,))  # type: ignore[arg-type]  # only what is printed


def test_differences_are_named(capsys):
    assert not answer(AGREEING, DIFFERING).agrees
    command._print("m", answer(AGREEING, DIFFERING))
    shown = capsys.readouterr().out
    assert "DIFFER" in shown and "w at step 2" in shown and "10000.0 ×" in shown


def test_how_much_was_cut_is_said(capsys):
    command._print("m", answer(AGREEING))
    assert "3 of 9" in capsys.readouterr().out
    assert answer(AGREEING).cuts and not answer(AGREEING, cut=0).cuts
    command._print("m", answer(AGREEING, cut=0))
    assert "nothing was cut" in capsys.readouterr().out
