from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.published.galvatron import read_galvatron, solve_galvatron

from shardwright.errors import Infeasible, ProblemError

DATA = Path(__file__).parents[2] / "data" / "joint" / "galvatron_llama28.json"


def test_the_published_optimum() -> None:
    data = read_galvatron(DATA)
    found = solve_galvatron(data)
    assert data["global_batch"] / found.cost == pytest.approx(2.5246283459, rel=1e-9)
    assert found.optimal
    assert (found.answer.pipeline, found.answer.strategy) == (1, "1-1-8f-c")
    assert found.answer.memory_mb == (28299 - 64,)  # the listed megabytes contain a buffer that tp 1 does not need


def test_with_pipelines_only_the_listed_second_best() -> None:
    data = json.loads(DATA.read_text())[0]
    data["pipelines"] = [p for p in data["pipelines"] if p["pp"] == 2]
    assert solve_galvatron(read_galvatron(data)).cost == pytest.approx(30.033460973989346, rel=1e-12)


def test_what_is_not_read_says_so() -> None:
    data = json.loads(DATA.read_text())[0]
    with pytest.raises(ProblemError, match="strategy per layer"):
        read_galvatron({**data, "one_strategy_for_all_layers": False})
    with pytest.raises(Infeasible, match="100 MB"):
        solve_galvatron({**data, "memory_limit_mb": 100})
