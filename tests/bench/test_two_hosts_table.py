"""The table of the two-hosts benchmark: speed-ups are ratios to the found plan, errors those of the prediction."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import two_hosts


def test_speedups_and_errors():
    seconds = {"found": 1.0, "data": 2.0, "fsdp": 4.0, "DDP": 2.0, "fully_shard": 4.0}
    steps = {name: [[0.0, own / 2, own / 2]] * 3 for name, own in seconds.items()}
    measured = {"taken": steps, "cores": steps, "losses": dict.fromkeys(seconds, 1.0)}
    guess = {"auto": 1.1, "data-parallel": 2.2, "fsdp": 3.0}
    predicted = {
        name: {"seconds": value, "waiting": value + 0.2, "phases": [0.0] * 3, "compute": [0.0] * 3, "bytes": 10**6}
        for name, value in guess.items()
    }
    worst: dict[str, float] = {}
    lines = two_hosts.table("alexnet", predicted, measured, worst)
    assert "| DDP | 2.000 s (2.000) | 2.200 s | +10 % | 2.00 | 2.00 | +0 % |" in lines
    assert "| fully_shard | 4.000 s (4.000) | 3.200 s | -20 % | 4.00 | 2.91 | -27 % |" in lines
    assert worst == pytest.approx({"speed-up": 1 - 3.2 / 1.1 / 4, "step time": 0.25})
