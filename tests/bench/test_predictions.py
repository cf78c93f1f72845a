"""No prediction moves unless the move is stored with a reason: instructions, seconds, bytes, and what searches choose."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from predictions import table
from predictions.__main__ import computed, main, names
from predictions.rows import opened, rank_kinds
from predictions.searches import SLOW, captured

STORED = {kind: table.read(kind) for kind in table.TABLES}
REMEDY = 'If that is as it should be, store it with the reason: make predictions STORE="why"'


@pytest.fixture(scope="module", autouse=True)
def _graphs() -> Iterator[None]:
    yield
    captured.cache_clear()


def unmoved(kind: str, name: str) -> None:
    found = table.comparable(table.moves(STORED[kind].get(name), computed(kind, name)))
    assert not found, "\n".join([f"{name} moved.", *table.lines(found), REMEDY])


@pytest.mark.parametrize("name", names("plans"))
def test_a_stored_plan_does_and_costs_what_was_stored(name: str) -> None:
    unmoved("plans", name)


@pytest.mark.parametrize("name", [name for name in names("searches") if name not in SLOW])
def test_a_search_chooses_what_was_stored(name: str) -> None:
    unmoved("searches", name)


def test_the_table_has_the_cases_that_there_are() -> None:
    for kind, rows in STORED.items():
        assert list(rows) == names(kind)
    assert set(names("searches")) >= SLOW


def test_a_moved_number_a_moved_link_and_a_moved_case_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    row: dict[str, Any] = dict(STORED["plans"]["recipe-fsdp"])
    phases = dict(row["ranks"]["0"])
    count, what, _ = phases["forward"].split(" ")
    phases["forward"] = f"{count} {what} 0000000000"
    moved = {**row, "seconds": row["seconds"] * (1 + 1e-8), "ranks": {**row["ranks"], "0": phases}}
    told = table.moves(row, moved)
    assert [move.quantity for move in told] == ["seconds", "ranks 0 forward links"]
    assert "+1e-06 %" in table.lines(told)[1] and "forward links of ranks 0 " in table.lines(told)[2]
    assert not table.moves(row, {**row, "seconds": row["seconds"] * (1 + 1e-10)})
    assert [line.split() for line in table.lines(table.moves(None, row))[1:]] == [["recipe-fsdp", "new"]]
    monkeypatch.setattr(table, "STORED_WITH", "1.0")  # what autograd keeps may differ there; nothing else
    assert [move.quantity for move in table.comparable(told)] == ["seconds"]


def test_an_instruction_that_waits_for_another_is_noticed() -> None:
    """The digests are of everything that an instruction is."""
    plan, graph = opened(table.HERE / "plans" / "recipe-fsdp.json")
    stage = plan.stages[0]
    decisions = replace(stage.decisions, sizes=replace(stage.decisions.sizes, bundle=1))
    moved = replace(plan, stages=(replace(stage, decisions=decisions),))
    before, after = ({"ranks": rank_kinds(one, graph)} for one in (plan, moved))
    assert {"ranks 0 forward what", "ranks 0 forward links"} <= {m.quantity for m in table.moves(before, after)}


def test_the_command_stores_a_move_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = "one-device-gpt"
    rows = {**STORED["plans"], case: {**STORED["plans"][case], "seconds": 1.0}}
    monkeypatch.setattr(table, "TABLES", {kind: tmp_path / f"{kind}.jsonl" for kind in table.TABLES})
    monkeypatch.setattr(table, "LOG", tmp_path / "log.md")
    table.write("plans", rows.values())
    table.write("searches", STORED["searches"].values())

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["predictions", case, *arguments])
        return main()

    assert run() == 1
    told = capsys.readouterr().out
    assert case in told and "1.0" in told and 'make predictions STORE="why"' in told
    assert run("--store", "one second was too long") == 0
    assert "one second was too long" in (tmp_path / "log.md").read_text()
    assert run() == 0
    assert json.loads((tmp_path / "plans.jsonl").read_text().splitlines()[0])["case"] == names("plans")[0]
    assert len(table.read("plans")) == len(rows)
