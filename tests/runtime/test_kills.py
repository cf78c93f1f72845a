"""Killed without a word at a random moment: no file is lost or mixed, and training goes on where it was."""

from __future__ import annotations

import os

from runtime.kills import lost
from runtime.pool import alone

KILLS = int(os.environ.get("SHARDWRIGHT_KILLS", "8"))


def test_every_file_is_the_old_or_the_new_one() -> None:
    assert not {kind: wrong for kind, wrong in alone(lost, KILLS).items() if wrong}
