"""Plans and checkpoints that somebody has changed give the right numbers or are refused, and run nothing.

A few of each kind of change here; ``python -m bench.tampered`` runs 200 of each.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.tampering import PLAN_KINDS, REFUSED, RIGHT, case, run_checkpoint, save_for, tampered_plan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def one_of_each_kind() -> list[int]:
    found: dict[str, int] = {}
    number = 0
    while len(found) < len(PLAN_KINDS):
        found.setdefault(tampered_plan(number)[0], number)
        number += 1
    return sorted(found.values())


def test_tampered_plans_run_rightly_or_are_refused(pair, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    for number in one_of_each_kind():
        kind, text = tampered_plan(number)
        ends = pair.run(case, number, text, str(tmp_path / "inside"))
        assert ends in ([RIGHT] * 2, [REFUSED] * 2), (number, kind, ends)


def test_tampered_checkpoints_are_read_rightly_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_for(tmp_path / "good")
    ends = [run_checkpoint(tmp_path / "good", number, tmp_path / "scratch") for number in range(40)]
    assert {end for _, end in ends} == {RIGHT, REFUSED}, ends
    assert {path.name for path in tmp_path.iterdir()} == {"good", "scratch"}
