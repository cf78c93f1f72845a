"""The one-page planner of the documentation is real: it runs, finds what it says, and is optimal."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_scratch.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)), scope)
    return scope


def test_it_finds_the_known_recipes(page: dict[str, Any]) -> None:
    assert page["plan"](65536, [1024, 1024, 1024])[1] == ["i", "i"]
    assert page["plan"](64, [8192, 32768, 8192])[1] == ["j", "k"]


@pytest.mark.parametrize("batch", [16, 1024, 65536])
def test_it_is_optimal(page: dict[str, Any], batch: int) -> None:
    widths = [512, 4096, 1024, 2048]
    loops, size = page["LOOPS"], 4 * batch

    def cost(path: tuple[str, ...]) -> float:
        total = sum(page["product"](p, batch, k, n) for p, k, n in zip(path, widths, widths[1:], strict=False))
        for a, b, k in zip(path, path[1:], widths[1:], strict=False):
            total += page["change"](loops[a][2], loops[b][0], size * k)
        return total + page["collective"](loops[path[-1]][2], "S0", size * widths[-1])

    best = min(cost(path) for path in itertools.product(loops, repeat=3))
    assert page["plan"](batch, widths)[0] == pytest.approx(best)
