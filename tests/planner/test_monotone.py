"""More is never slower: a few of the random models of ``bench/monotone.py``, which looks at hundreds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from monotone import TOLERANCE, checks


@pytest.mark.parametrize("seed", [2, 7])
def test_more_memory_devices_and_bandwidth_are_never_slower_nor_is_freedom(seed: int) -> None:
    found = checks(seed, everything=seed == 2)
    assert len(found["worse"]) >= 2
    assert not {what: worse for what, worse in found["worse"].items() if worse > TOLERANCE}
