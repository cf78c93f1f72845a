"""Killed without a word at a random moment: no file is lost or mixed, and training goes on where it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KILLS = os.environ.get("SHARDWRIGHT_KILLS", "8")


def test_every_file_is_the_old_or_the_new_one() -> None:
    script = Path(__file__).with_name("kills.py")
    done = subprocess.run([sys.executable, str(script), KILLS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
