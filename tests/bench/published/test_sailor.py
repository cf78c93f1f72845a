from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench.published.sailor import mean_error, predict, read_plans, read_profiles

from shardwright.errors import ProblemError

DATA = Path(__file__).parents[2] / "data" / "joint"
PLANS, PROFILES = read_plans(DATA / "sailor_plans.csv"), read_profiles(DATA / "sailor_profiles.json")


def test_nearer_to_the_measurements_than_sailors_own_rule() -> None:
    ours, theirs = mean_error(PLANS, PROFILES)
    assert ours <= 0.08
    assert theirs > ours
    assert sum(not plan.doubt for plan in PLANS) == 14


def test_one_stage_on_one_replica_is_its_layers_and_an_update() -> None:
    plan = next(p for p in PLANS if p.name.endswith("M4_G32"))
    profile = next(p for p in PROFILES["profiles"] if (p["gpu"], p["microbatch"], p["tp"]) == ("GH-96", 1, 4))
    layers = sum(profile["forward"]) + sum(profile["backward"])
    assert predict(plan, PROFILES) == pytest.approx(32 * layers + max(profile["update"]))


def test_a_missing_profile_is_named() -> None:
    with pytest.raises(ProblemError, match="micro-batch 3 and tp 4"):
        predict(replace(PLANS[0], microbatch_size=3), PROFILES)
