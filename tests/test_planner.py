"""The whole way from a model to a plan: at least as good as every baseline that fits, and honest about it."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import Infeasible, ShardwrightError
from shardwright.planner import Options, plan
from shardwright.zoo.reference import resolve


@pytest.mark.parametrize("reference", ["gpt:small", "alexnet:small", "rnnlm:small"])
def test_the_found_plan_beats_every_baseline_that_fits(reference: str) -> None:
    resolved = resolve(reference, batch=8)
    made = plan(resolved.model, resolved.args, resolved.kwargs, cluster="8xH100", reference=reference)
    for candidate in made.candidates:
        if candidate.prediction is not None and candidate.prediction.fits:
            assert made.prediction.step_seconds <= candidate.prediction.step_seconds * (1 + 1e-9), candidate.name


def test_a_model_that_fits_nowhere_says_so() -> None:
    with torch.device("meta"):
        model, x = torch.nn.Linear(400_000, 400_000), torch.empty(8, 400_000)
    with pytest.raises(Infeasible, match="fits") as caught:
        plan(model, (x,), cluster="2xH100")
    assert "more devices" in caught.value.remedy


def test_memory_can_be_asked_for() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(6)))
        x = torch.empty(8192, 4096)
    free = plan(model, (x,), cluster="8xH100", search="fsdp")
    limit = 0.9 * plan(model, (x,), cluster="8xH100", search="data-parallel").prediction.memory_bytes
    assert free.prediction.memory_bytes < limit
    assert plan(model, (x,), cluster="8xH100", memory_limit=limit).prediction.memory_bytes <= limit
    with pytest.raises(Infeasible):
        plan(model, (x,), cluster="8xH100", search="data-parallel", memory_limit=limit)


def test_an_unknown_search_is_refused_before_any_work() -> None:
    with pytest.raises(ShardwrightError, match="fsdq"):
        Options(search="fsdq")
