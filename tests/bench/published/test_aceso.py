"""Aceso's rules on its own plans, its three models, and small chains against trying everything."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.published.aceso import (
    COLUMNS,
    NEVER_RECOMPUTED,
    AcesoPlan,
    AcesoStage,
    check,
    plan_from_published,
    read_aceso,
    solve_aceso,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shardwright.errors import Infeasible, ProblemError

DATA = json.loads((Path(__file__).parents[2] / "data" / "joint" / "aceso_l4.json").read_text())


@pytest.mark.parametrize("model", [m["name"] for m in DATA["models"]])
def test_the_rules_give_the_published_predictions(model: str) -> None:
    problem = read_aceso(DATA, model)
    for published in next(m["plans"] for m in DATA["models"] if m["name"] == model):
        seconds, memory = check(problem, plan_from_published(published))
        assert [1e3 * s for s in seconds] == pytest.approx(published["predicted_ms_per_stage"], rel=5e-7)
        assert memory == pytest.approx(published["predicted_mb_per_stage"], rel=5e-7)


def test_a_short_model_is_proved_within_one_per_cent_and_fits() -> None:
    whole = next(m for m in DATA["models"] if m["name"] == "gpt-1.3B")
    short = {**whole, "layers": 4, "profiles": [p for p in whole["profiles"] if p["microbatch"] == 1]}
    problem = read_aceso({**DATA, "models": [short], "memory_limit_mb": 7000})
    found = solve_aceso(problem)
    assert found.gap < 0.01
    seconds, memory = check(problem, found.answer)
    assert max(seconds) == pytest.approx(found.cost)
    assert max(memory) <= problem.memory_mb
    assert any(any(stage.recompute) for stage in found.answer.stages)  # the limit binds


def small(draw: st.DrawFn, per_node: int) -> dict[str, Any]:
    """Two layers of three operators on two devices, and a memory limit that sometimes binds."""
    layer = ["enc-1st-layernorm", "enc-attention-dropout", "enc-MLP-gelu"]
    names = ["encoder-embedding", *layer, "final-layernorm", "gpt-post-process"]

    def row(scale: float) -> list[float]:
        number = st.integers(1, 5)
        return [
            1000.0 * draw(number) / scale,
            1000.0 * draw(number) / scale,
            float(draw(number)),
            float(draw(number)),
            float(draw(st.integers(0, 2))),
            float(draw(number)),
            float(draw(st.integers(0, 2))),
            float(draw(st.integers(0, 2))),
        ]

    profiles = [{"microbatch": size, "tp": tp, "rows": [row(tp) for _ in names]} for size in (1, 2) for tp in (1, 2)]
    return {
        "devices_per_node": per_node,
        "memory_limit_mb": draw(st.sampled_from([40.0, 60.0, 80.0, 200.0])),
        "bandwidth_gb_per_s_within_node": [4.0, 5.0, 6.0],
        "bandwidth_gb_per_s_between_nodes": [1.0, 2.0, 3.0],
        "models": [
            {
                "name": "small",
                "layers": 2,
                "devices": 2,
                "global_batch": 4,
                "head_ops": names[:1],
                "layer_ops": layer,
                "tail_ops": names[-2:],
                "columns": list(COLUMNS),
                "profiles": profiles,
            }
        ],
    }


@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
@pytest.mark.parametrize("per_node", [2, 1])
def test_small_chains_against_trying_everything(per_node: int, data: st.DataObject) -> None:
    """One node, and two: then what lies between the stages is slow."""
    problem = read_aceso(data.draw(st.composite(small)(per_node)))
    names = problem.operators
    best = counted = np.inf  # of all plans, and of those whose last run of recomputed operators counts in every stage
    for cut in range(1, len(names) + 1):
        for size in (1, 2, 4):
            spans = [(0, cut), (cut, len(names))] if cut < len(names) else [(0, cut)]
            for degrees in itertools.product([(1, 1), (1, 2), (2, 1)], repeat=len(spans)):
                if sum(t * d for t, d in degrees) > 2 or any(size // d not in (1, 2) or size % d for _, d in degrees):
                    continue
                choices = [
                    [
                        AcesoStage(a, b, tp, dp, flags)
                        for flags in itertools.product((False, True), repeat=b - a)
                        if not any(f and n in NEVER_RECOMPUTED for f, n in zip(flags, names[a:b], strict=True))
                    ]
                    for (a, b), (tp, dp) in zip(spans, degrees, strict=True)
                ]
                # Stages are independent but for their sum: per stage the fastest that fits.
                stages = []
                for number, options in enumerate(choices):
                    fitting = []
                    for option in options:
                        around = tuple(option if k == number else c[0] for k, c in enumerate(choices))
                        seconds, memory = check(problem, AcesoPlan(size, around))
                        if memory[number] <= problem.memory_mb:
                            fitting.append((seconds[number], option))
                    if fitting:
                        stages.append(min(fitting, key=lambda pair: pair[0])[1])
                if len(stages) == len(spans):
                    value = max(check(problem, AcesoPlan(size, tuple(stages)))[0])
                    best = min(best, value)
                    ends = [
                        (*stage.recompute[-2:], names[stage.end - 2]) for stage in stages if len(stage.recompute) > 1
                    ]
                    if (True, True, "enc-attention-dropout") not in ends:
                        counted = min(counted, value)
    if not np.isfinite(best):
        with pytest.raises(Infeasible, match="small"):
            solve_aceso(problem)
        return
    try:
        found = solve_aceso(problem)
    except Infeasible:
        # Answers count a layer's last operator as if the next layer's first were always recomputed with it.
        assert solve_aceso(replace(problem, memory_mb=problem.memory_mb + 5)).lower_bound <= best * (1 + 1e-9)
        return
    assert found.lower_bound <= best * (1 + 1e-9)
    assert found.cost >= best * (1 - 1e-9)
    if per_node == 1 and not any(any(stage.recompute) for stage in found.answer.stages):
        assert found.cost == pytest.approx(best)  # transfers are priced exactly
    elif per_node == 2:
        assert found.cost <= counted * 1.02  # what continues into the next layer is counted as if it always did


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ProblemError, match=r"gpt-9.*") as raised:
        read_aceso(DATA, "gpt-9")
    assert "gpt-1.3B" in raised.value.remedy
