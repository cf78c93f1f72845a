"""Plans as files: nothing is lost, another model is refused in words, damaged files are one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import PlanError
from shardwright.frontend import capture
from shardwright.planner import plan
from shardwright.plans import Plan, Proof, from_json, to_json
from shardwright.plans.serial import placement_from, placement_text

placements = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 9)),
    st.builds(Partial, st.sampled_from(["sum", "max", "min"])),
)


@given(placements)
def test_placements_survive_their_text(placement: Shard | Replicate | Partial) -> None:
    assert placement_from(placement_text(placement)) == placement


def _model(width: int = 64) -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, 8))


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(_model(), (torch.empty(16, 32, device="meta"),), cluster="2x2xH100")


def test_a_plan_survives_its_file(made: Plan, tmp_path: Path) -> None:
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    assert from_json(to_json(made)) == made


def test_a_file_of_the_first_spelling_is_read(made: Plan) -> None:
    document = json.loads(to_json(made).replace('"optimizer":', '"optimiser":'))
    told = {"cost": 2.0, "lower_bound": 1.0, "optimal": False, "seconds": 3.0, "scope": "all plans", "step_bound": 0.5}
    text = json.dumps({**document, "format": "shardwright-plan-2", "proof": told})
    assert from_json(text) == replace(made, proof=Proof(cost=2.0, seconds=3.0))  # of bounds that words alone are about


def test_a_device_that_was_measured_again_does_not_stop_a_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Running needs no prices; whoever prices it again is told that they are others."""
    found = plan(_model(), (torch.empty(16, 32, device="meta"),), cluster="2xH200")
    label = found.cluster.device.calibration
    found.save(tmp_path / "plan.json")
    old = (tmp_path / "plan.json").read_text().replace(f'"label": "{label}"', '"label": "measured 1999-12-31"')
    assert "1999" in old
    (tmp_path / "plan.json").write_text(old)
    assert Plan.load(tmp_path / "plan.json") == found
    assert "'measured 1999-12-31'" in caplog.text and label in caplog.text


def test_a_plan_is_readable_and_free_of_code(made: Plan) -> None:
    data = json.loads(to_json(made))
    assert data["format"] == "shardwright-plan-3"
    assert set(data["stages"][0]["splits"]) == set(made.stages[0].strategy.splits)
    assert "H100" in data["cluster"]["name"]


def test_the_right_model_is_accepted_and_another_refused_in_words(made: Plan) -> None:
    made.check(capture(_model(), (torch.empty(16, 32, device="meta"),)))
    with pytest.raises(PlanError, match=r"input .*float32\[16, 32\] in the plan and float32\[24, 32\]"):
        made.check(capture(_model(), (torch.empty(24, 32, device="meta"),)))
    with pytest.raises(PlanError, match=r"parameter 0\.weight"):
        made.check(capture(_model(128), (torch.empty(16, 32, device="meta"),)))
    with pytest.raises(PlanError, match="evaluation"):
        made.check(capture(_model().eval(), (torch.empty(16, 32, device="meta"),)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "shardwright-plan-2"}', '{"format": "other"}'])
def test_damaged_files_are_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert caught.value.remedy


@pytest.mark.parametrize("dtype", ["load", "hub", ""])
def test_a_dtype_is_one(made: Plan, dtype: str) -> None:
    """Examples of plans without a graph were made of ``getattr(torch, …)``."""
    document = json.loads(to_json(made))
    document["signature"]["inputs"][0][1] = dtype
    with pytest.raises(PlanError, match="damaged"):
        from_json(json.dumps(document))


def test_the_proof_bounds_the_cost(made: Plan) -> None:
    assert made.proof.sum_bound <= made.proof.cost
    assert made.prediction.step_seconds > 0
    assert made.prediction.fits


def test_another_model_is_known_by_its_parameters_before_it_is_captured(
    made: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from shardwright.runtime import parallelize

    monkeypatch.setattr(
        sys.modules["shardwright.runtime.parallelize"], "capture", lambda *call: pytest.fail("captured")
    )
    other = torch.nn.Sequential(torch.nn.Linear(32, 65), torch.nn.ReLU(), torch.nn.Linear(65, 8))
    shape = r"another model: parameter 0.weight is float32\[64, 32\] in the plan and float32\[65, 32\] in the model"
    with pytest.raises(PlanError, match=shape):
        parallelize(other, made)
    with pytest.raises(PlanError, match=r"parameter 0\.weight is .* and bfloat16"):
        parallelize(_model().bfloat16(), made)
    with pytest.raises(PlanError, match="and absent in the model"):
        parallelize(torch.nn.Linear(32, 8), made)
    made.check_parameters(_model().named_parameters(remove_duplicate=False))
