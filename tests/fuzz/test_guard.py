"""The fuzzer's guard sees what it is there for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz import guard
from shardwright.errors import ShardwrightError


def _spin() -> None:
    while True:
        sum(range(1000))


def test_what_is_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PROCESSOR_SECONDS", 0.3)
    monkeypatch.setattr(guard, "CLOCK_SECONDS", 1.0)
    elsewhere = tmp_path.parent / "elsewhere"
    inside = tmp_path / "inside"
    inside.mkdir()

    def seen(case) -> str:
        return guard.watched(case, inside) or ""

    assert seen(lambda: [][0]).startswith("traceback: IndexError")
    assert seen(_spin).startswith("hang")
    monkeypatch.setattr(guard, "PROCESSOR_SECONDS", 30.0)
    assert seen(lambda: time.sleep(30)).startswith("hang")
    assert seen(lambda: len(bytearray(3 << 30))).startswith("more than")
    assert "wrote" in seen(lambda: elsewhere.write_text("x"))
    assert "Popen" in seen(lambda: subprocess.run([sys.executable, "-c", ""], check=True))
    assert "os.system" in seen(lambda: os.system("true"))
    assert "exit status" in seen(lambda: sys.exit(7))
    assert not seen(lambda: (inside / "file").write_text("x"))
    assert not seen(lambda: sys.exit(2))

    def refused() -> None:
        raise ShardwrightError("One sentence.")

    assert not seen(refused)
