"""A plan from somebody else: it can be looked at in every way, and nothing that it names or holds is run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwright.cli import main
from shardwright.errors import PlanError
from shardwright.graph import Atom, Graph, Op
from shardwright.planner import plan
from shardwright.plans import Plan
from shardwright.plans.packed import pack, unpack

MODEL = """
from pathlib import Path
import torch

def build(batch=16):
    Path(__file__).with_suffix(".ran").write_text("yes")
    print("hello from the model")
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU()), (torch.empty(batch, 32),), {}
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a model's file and the plan that was made from it, before the file has run again."""
    (tmp_path / "theirs.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "plan", "theirs.py:build", "--cluster", "2xH100", "-o", "plan.json", "--json") == 0
    json.loads(capsys.readouterr().out)  # what the model printed went elsewhere
    (tmp_path / "theirs.ran").unlink()
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("explain", "plan.json"),
        ("explain", "plan.json", "linear*", "--json"),
        ("explain", "plan.json", "--memory"),
        ("simulate", "plan.json", "--trace", "trace.json"),
        ("report", "plan.json", "-o", "plan.svg"),
        ("plan", "plan.json", "--pin", "linear=n0"),
    ],
)
def test_looking_at_a_plan_runs_nothing(
    foreign: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(foreign)
    assert run(monkeypatch, *command) == 0
    assert not (foreign / "theirs.ran").exists()


def test_the_model_of_a_plan_is_run_only_when_asked_for(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(foreign)
    assert run(monkeypatch, "plan", "plan.json", "--batch", "32") == 2
    assert "--trust" in capsys.readouterr().err
    assert not (foreign / "theirs.ran").exists()
    monkeypatch.chdir("/")  # the path in the plan means the same from everywhere
    assert run(monkeypatch, "explain", str(foreign / "plan.json"), "--trust", "--json") == 0
    assert (foreign / "theirs.ran").exists()
    (foreign / "theirs.ran").unlink()
    assert run(monkeypatch, "explain", str(foreign / "plan.json"), "--model", f"{foreign}/theirs.py:build") == 0
    assert (foreign / "theirs.ran").exists()


def test_a_plan_without_its_graph_asks_for_the_model(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(Plan.load(foreign / "plan.json"), captured=None).save(foreign / "old.json")
    assert run(monkeypatch, "explain", "old.json") == 2
    assert "--trust" in capsys.readouterr().err
    assert not (foreign / "theirs.ran").exists()


def _planned() -> Plan:
    with torch.device("meta"):
        return plan(torch.nn.Linear(32, 64), (torch.empty(16, 32),), cluster="2xH100")


def test_a_plan_made_in_python_is_explained_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _planned().save(tmp_path / "plan.json")
    for command in ("explain", "simulate"):
        assert run(monkeypatch, command, str(tmp_path / "plan.json"), "--json") == 0
        assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("shardwright.autograd_function.default", ("os:system", (), "[]")),  # would import what it names
        ("aten.from_file.default", ("/tmp/made-by-a-plan", True, 8)),  # would write a file
        ("mylib.anything.default", ()),
        ("aten.relu_.default", ()),
        ("load_library.x.y", ()),
        ("aten", ()),
    ],
)
def test_a_graph_from_a_file_holds_nothing_but_computation(target: str, arguments: tuple) -> None:
    graph = _planned().graph()
    crafted = replace(graph, ops=(replace(graph.ops[0], target=target, args=arguments),))
    text = pack(crafted)
    assert text is not None
    with pytest.raises(PlanError, match=target.split(".")[0]):
        unpack(text)
    assert unpack(text, trusted=True) == crafted


def test_a_graph_survives_its_line() -> None:
    graph = _planned().graph()
    odd = Op("odd", "aten.zeros.default", ((2, 3),), (("dtype", Atom("dtype", "float32")),), (None,), "a.b", "f.py:3")
    wider = replace(graph, ops=(*graph.ops, odd))
    text = pack(wider)
    assert text is not None
    assert unpack(text) == wider


@pytest.mark.parametrize("damage", ["", "!!!", "AAAA", "eJwrSS0uAQAEXQHB"])
def test_a_damaged_graph_is_one_sentence(damage: str) -> None:
    with pytest.raises(PlanError, match="graph inside the plan"):
        unpack(damage)


def test_a_graph_too_large_is_left_out_and_a_bomb_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _planned().graph()
    text = pack(made)
    assert text is not None
    monkeypatch.setattr("shardwright.plans.packed.LARGEST", 100)
    assert pack(made) is None
    with pytest.raises(PlanError, match="too large"):
        unpack(text)


def test_a_plan_says_in_one_line_what_it_is() -> None:
    made = _planned()
    assert len(repr(made)) < 200
    assert "2xH100" in repr(made)
    assert isinstance(made.captured, Graph)


def test_a_plan_made_in_python_is_explained_simulated_and_reported_in_python(tmp_path: Path) -> None:
    import shardwright

    made = _planned()
    made.save(tmp_path / "plan.json")
    for one in (made, Plan.load(tmp_path / "plan.json")):
        assert shardwright.explain(one)["operators"][0]["operator"] == "linear"
        assert any(option["chosen"] for option in shardwright.explain(one, "linear")[0]["options"])
        assert shardwright.simulate(one).seconds == pytest.approx(made.prediction.step_seconds)
        shardwright.report(one, tmp_path / "plan.svg")
        assert (tmp_path / "plan.svg").read_text().lstrip().startswith("<")
