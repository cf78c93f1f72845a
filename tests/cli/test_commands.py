"""The command line as a user meets it: help with examples, JSON beside tables, bad input in one sentence with status 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardwright.cli import app, main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of ``shardwright ARGUMENTS``, run in this process."""
    monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


COMMANDS = sorted(str(command.name) for command in app.registered_commands)


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text()
    assert {"plan", "verify", "models", "clusters", "choose", "place", "ops", "explain"} <= set(COMMANDS)
    for command in COMMANDS:
        assert f"shardwright {command}" in page, command


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, command, "--help") == 0
    assert f"shardwright {command}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "gpd", "--cluster", "8xH200"),
        ("plan", "gpt:small", "--cluster", "8xH999"),
        ("plan", "gpt:small", "--cluster", "nonsense"),
        ("plan", "gpt:small", "--cluster", "8xH200", "--search", "fsdq"),
        ("plan", "gpt:small", "--cluster", "8xH200", "--recompute", "sometimes"),
        ("plan", "gpt:small,layers=many", "--cluster", "8xH200"),
        ("plan", "missing.py:build", "--cluster", "8xH200"),
        ("plan", "gpt:small", "--cluster", "2xH200", "--pin", "nothing=S0"),
        ("plan", "gpt:small", "--cluster", "2xH200", "--stages", "many"),
        ("plan", "gpt:small", "--cluster", "2xH200", "--devices", "two"),
        ("plan", "gpt:small", "--cluster", "2xH200", "--devices", "2..4", "--max-batch"),
        ("plan", "gpt:small", "--cluster", "2xH200", "--devices", "2..4", "--frontier"),
        ("plan", "gpt:small", "--cluster", "2xH200", "--cluster", "2xH100", "--price", "cheap"),
        ("plan", "gpt:small", "--cluster", "2xH200", "--objective", "latency"),
        ("plan", "gpt:small", "--cluster", "2xH200", "--inference", "--objective", "speed"),
        ("plan", "gpt:small", "--cluster", "2xH200", "--inference", "--cache", "8"),
        ("plan", "gpt:small", "--cluster", "2xH200", "--inference", "--max-batch"),
        ("explain", "missing.json"),
        ("choose", "missing.json"),
        ("place", "missing.json"),
    ],
)
def test_bad_input_is_one_sentence_and_a_remedy(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("shardwright: ")
    assert len(message.strip().splitlines()) == 2
    assert "Traceback" not in message


def test_a_plan_is_written_explained_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    assert run(monkeypatch, "plan", "gpt:small", "--cluster", "2xH100", "--batch", "8", "-o", path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {c["name"] for c in document["candidates"]} >= {"auto", "data-parallel", "fsdp", "megatron"}
    assert document["proof"]["sum_bound"] <= document["proof"]["cost"]
    assert run(monkeypatch, "explain", path, "linear*", "--json") == 0
    options = json.loads(capsys.readouterr().out)[0]["options"]
    assert sum(option["chosen"] for option in options) == 1


def test_models_and_clusters_speak_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("models", "clusters"):
        assert run(monkeypatch, command, "--json") == 0
        assert json.loads(capsys.readouterr().out)


def test_questions_about_a_job_are_answered_as_json_and_as_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("plan", "gpt:small,layers=1", "--batch", "8", "--recompute", "none", "--cluster", "1xH100")
    assert run(monkeypatch, *asked, "--cluster", "1xA100-80GB", "--price", "2", "--price", "0.1", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    costs = {row["cluster"]: row["price_per_million_tokens"] for row in answer["rows"]}
    assert answer["best"]["cluster"] == min(costs, key=costs.__getitem__)
    assert run(monkeypatch, *asked, "--devices", "1,2") == 0
    shown = capsys.readouterr().out
    assert "worth it" in shown and "1xH100" in shown and "2x1xH100" in shown
