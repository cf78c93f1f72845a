"""Galvatron's two published problems, and small ones against trying everything."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench.published.galvatron import (
    Ends,
    GalvatronProblem,
    Pipeline,
    Strategy,
    read_galvatron,
    solve_galvatron,
    step_seconds,
)

from shardwright.errors import Infeasible, ProblemError

DATA = Path(__file__).parents[2] / "data" / "joint" / "galvatron_llama28.json"
PER_LAYER, ONE_FOR_ALL = (read_galvatron(DATA, f"llama-28-layers-seq8192-chunks{m}") for m in (32, 8))


def test_the_published_optimum_with_a_strategy_per_layer() -> None:
    found = solve_galvatron(PER_LAYER)
    assert PER_LAYER.global_batch / found.cost == pytest.approx(2.6485091404, rel=1e-9)
    assert found.optimal and found.answer.pipeline == 1 and found.answer.ends == (8, 1, 0)
    assert dict(found.answer.layers[0]) == {"1-4*-2f-c": 14, "1-4*-2f": 12, "1-4*-2": 2}
    assert found.answer.memory_mb == (29439,)


def test_the_published_optimum_with_one_strategy() -> None:
    found = solve_galvatron(ONE_FOR_ALL)
    assert ONE_FOR_ALL.global_batch / found.cost == pytest.approx(2.5246283459, rel=1e-9)
    assert found.optimal
    assert (found.answer.pipeline, found.answer.layers) == (1, ((("1-1-8f-c", 28),),))
    assert found.answer.memory_mb == (28299 - 64,)  # the listed megabytes contain a buffer that tp 1 does not need


@pytest.mark.parametrize(("pp", "listed"), [(2, 24.400646337673802), (4, 27.452854122361146)])
def test_the_listed_optimum_of_every_pipeline_degree(pp: int, listed: float) -> None:
    found = solve_galvatron(replace(PER_LAYER, pipelines=tuple(p for p in PER_LAYER.pipelines if p.pp == pp)))
    assert found.cost == pytest.approx(listed, rel=1e-9) and found.optimal


def test_with_pipelines_only_the_listed_second_best() -> None:
    two = replace(ONE_FOR_ALL, pipelines=tuple(p for p in ONE_FOR_ALL.pipelines if p.pp == 2))
    assert solve_galvatron(two).cost == pytest.approx(30.033460973989346, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_small_problems_against_trying_every_layer(seed: int) -> None:
    """Three layers a stage in every order, with changes between degrees that cost something."""
    draw = np.random.default_rng(seed)
    pp, degrees = 1 + seed % 2, (1, 2, 2)
    strategies = tuple(
        Strategy(f"s{k}", tp, 1, 0, *map(float, draw.uniform(1, 3, 2)), tuple(draw.integers(2, 9, pp).astype(float)))
        for k, tp in enumerate(degrees)
    )
    ends = tuple(
        Ends(tp, 1, 0, tuple(draw.uniform(0, 1, pp)), tuple(draw.integers(0, 4, pp).astype(float))) for tp in (1, 2)
    )
    change = float(draw.uniform(0, 0.5))
    table = tuple(tuple(change * (a != b) for b in degrees) for a in degrees)
    pipeline = Pipeline(pp, (3,) * pp, strategies, ends, {"2": 1.0}, table)
    problem = GalvatronProblem("small", 2 * pp, 8, 4, float(draw.integers(12, 22)), (pipeline,))
    best = np.inf
    for chosen in itertools.product(range(3), repeat=3 * pp):
        for end in ends:
            stages = [chosen[3 * i : 3 * i + 3] for i in range(pp)]
            buffer = 0.0 if end.tp == 1 and not any(chosen) else 1.0
            memory = [
                sum(strategies[k].memory_mb_per_stage[i] for k in own) + end.memory_mb_per_stage[i] + buffer
                for i, own in enumerate(stages)
            ]
            if max(memory) <= problem.memory_limit_mb:
                plain = [
                    sum(strategies[k].seconds_without_sync for k in own)
                    + sum(table[a][b] for a, b in itertools.pairwise(own))
                    + end.seconds_without_sync[i]
                    for i, own in enumerate(stages)
                ]
                summed = [sum(strategies[k].seconds_with_sync for k in own) for own in stages]
                best = min(best, step_seconds(plain, summed, 4))
    if np.isfinite(best):
        found = solve_galvatron(problem)
        assert found.cost == pytest.approx(best, rel=1e-9) and found.optimal
    else:
        with pytest.raises(Infeasible):
            solve_galvatron(problem)


def test_what_does_not_fit_or_is_not_named_says_so() -> None:
    with pytest.raises(Infeasible, match="100 MB"):
        solve_galvatron(replace(PER_LAYER, memory_limit_mb=100.0))
    with pytest.raises(ProblemError, match="several problems") as raised:
        read_galvatron(DATA)
    assert "llama-28-layers-seq8192-chunks8" in raised.value.remedy
