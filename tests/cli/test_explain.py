"""``shardwright explain`` and planning again from a plan, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .test_commands import run

MODEL = "gpt:small,layers=2"


def test_options_their_totals_and_layouts_are_explained_and_a_pin_is_searched_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(tmp_path / "plan.json"), str(tmp_path / "other.json")
    made = ("--cluster", "2xH100", "--batch", "64", "--memory", "1", "--all-devices", "-o", first, "--json")
    assert run(monkeypatch, "plan", MODEL, *made) == 0
    capsys.readouterr()
    assert run(monkeypatch, "explain", first, "blocks.1.feed.up", "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["repeated"] == 2
    assert sum(option["chosen"] for option in entry["options"]) == 1
    totals = [option["total_seconds"] for option in entry["options"]]
    assert totals == sorted(totals) and len(totals) >= 4
    by_split = {option["split"][0]: option for option in entry["options"]}
    assert by_split["j"]["layouts"] == "R, S0, S0 → S2"
    assert "of 1 GB, the memory limit" in entry["binding"]

    pinned = "n1" if not by_split["n1"]["chosen"] else "n0"
    assert (
        run(monkeypatch, "plan", first, "--pin", f"blocks.1.feed.up={pinned}", "--all-devices", "-o", second, "--json")
        == 0
    )
    again = json.loads(capsys.readouterr().out)
    assert again["cluster"] == "2xH100"
    assert again["before"]["memory_bytes"] > 0
    assert run(monkeypatch, "explain", second, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["asked"] == {"memory_limit": 1e9, "pins": [f"blocks.1.feed.up={pinned}"], "forbidden": []}
    assert f"pin 'blocks.1.feed.up={pinned}' holds" in told["binding"]
    up = {row["module"]: row["split"] for row in told["operators"] if row["module"].endswith("feed.up")}
    assert up["blocks.1.feed.up"] == [pinned]

    assert run(monkeypatch, "explain", second, "blocks.1.feed.up", "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert [option["split"] for option in entry["options"]] == [[pinned]]


def test_memory_that_binds_is_said_and_tables_are_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    assert run(monkeypatch, "plan", MODEL, "--cluster", "2xH100", "--batch", "64", "-o", path, "--json") == 0
    # A little above what it uses: with less, recomputing on one device is the fastest, and uses far less.
    limit = 1.001 * json.loads(capsys.readouterr().out)["prediction"]["memory_bytes"] / 1e9
    assert run(monkeypatch, "plan", path, "--memory", str(limit), "-o", path, "--json") == 0
    capsys.readouterr()
    assert run(monkeypatch, "explain", path) == 0
    told = capsys.readouterr().out
    assert "Memory binds" in told
    assert "blocks.*.feed.up.weight" in told
    assert run(monkeypatch, "explain", path, "blocks.0.feed.up") == 0
    told = capsys.readouterr().out
    assert "one of 2 that decide together" in " ".join(told.split())
    assert "◀ chosen" in told


def test_operators_without_a_rule_are_listed_with_their_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "whole.py").write_text(
        "import torch\n"
        "class Whole(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = torch.nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.pdist(self.inner(x)).sum()\n"
        "def model():\n"
        "    return Whole(), (torch.randn(16, 8),), {}\n"
    )
    path = str(tmp_path / "plan.json")
    assert run(monkeypatch, "plan", f"{tmp_path / 'whole.py'}:model", "--cluster", "2xH100", "-o", path) == 0
    capsys.readouterr()
    assert run(monkeypatch, "explain", path, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["replicated"]
    assert any("pdist" in what and seconds > 0 for _, what, seconds in rows)
    assert run(monkeypatch, "explain", path) == 0
    assert "runs whole on every rank for want of a rule" in " ".join(capsys.readouterr().out.split())
