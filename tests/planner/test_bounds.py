"""Nothing that can be asked for is faster than what is found unasked, and no plan lies below a bound: a few small random
problems of ``bench/bounds.py``, which looks at sixty."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from bounds import checks, violations


@pytest.mark.parametrize("seed", [10, 11])
def test_no_option_recipe_or_pin_is_faster_and_no_plan_is_below_a_bound(seed: int) -> None:
    row = checks(seed, small=True)
    assert len(row["compared"]) >= 5
    assert row["note"] or (row["step_bound"] > 0 and row["spoken_of"] >= 5)
    assert not violations(row) and not row["dropped"]
