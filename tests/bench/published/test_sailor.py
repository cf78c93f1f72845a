"""Sailor's measured plans: nearer to them than its own rule, unlike devices among them; rows nobody can read are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench.published.sailor import mean_error, predict, read_plans, read_profiles

from shardwright.errors import ProblemError

DATA = Path(__file__).parents[2] / "data" / "joint"
(PLANS, REFUSED), PROFILES = read_plans(DATA / "sailor_plans.csv"), read_profiles(DATA / "sailor_profiles.json")


def test_nearer_to_the_measurements_than_sailors_own_rule() -> None:
    ours, theirs = mean_error(PLANS, PROFILES)
    assert ours < 0.085 and theirs > 0.09
    assert sum(not plan.doubt for plan in PLANS) == 32 and not REFUSED
    alike = [plan for plan in PLANS if not plan.mixed]
    assert mean_error(alike, PROFILES)[0] < 0.06  # on unlike devices the rule is nearer


def test_one_stage_on_one_replica_is_its_layers_and_an_update() -> None:
    plan = next(p for p in PLANS if p.name.endswith("M4_G32"))
    profile = next(p for p in PROFILES.profiles if (p.model, p.gpu, p.microbatch, p.tp) == ("OPT-350", "GH-96", 1, 4))
    layers = sum(profile.forward) + sum(profile.backward)
    assert predict(plan, PROFILES) == pytest.approx(32 * layers + max(profile.update))


def test_the_slowest_of_unlike_replicas_counts() -> None:
    mixed = next(p for p in PLANS if p.name == "mit-N4-N4_D4")
    assert mixed.mixed and len(mixed.replicas[0]) == 4
    alone = [
        predict(replace(mixed, replicas=(((gpu, 8),),)), PROFILES) for gpu in ("RTX-3090", "RTX-2080", "Titan-RTX")
    ]
    assert predict(mixed, PROFILES) > max(alone)  # and gradients are summed between them


def test_a_missing_profile_is_named() -> None:
    with pytest.raises(ProblemError, match="micro-batch 3 and tp 4"):
        predict(replace(PLANS[0], microbatch_size=3), PROFILES)


def test_an_unreadable_row_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    lines = (DATA / "sailor_plans.csv").read_text().splitlines()
    lines[3] = lines[3].replace("GH-96:tp4", "GH-96 four")
    lines[5] = lines[5].replace(",2,", ",many,", 1)
    lines[7] = ",".join(lines[7].split(",")[:6])
    lines[9] = lines[9].replace("1024", "1" + "0" * 30, 2).replace("|", "+", 1)
    (tmp_path / "plans.csv").write_text("\n".join(lines))
    plans, refused = read_plans(tmp_path / "plans.csv")
    assert len(plans) + len(refused) == 36 and len(plans) >= 32
    assert "line 4 (clariden-GPT-NEO-N2-N2_D1): '1xGH-96 four' is no GPU:tpN" in refused[0]
