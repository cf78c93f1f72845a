"""What counts as the same numbers: other orders of summation do, mistakes of any kind do not.

A batch whose rows stand in another order is summed in another order, as on several devices, without any of them.
"""

from __future__ import annotations

import copy

import pytest
import torch

from shardwright.runtime.compare import TIMES, compare
from shardwright.runtime.recorded import replayed, train
from shardwright.runtime.verify import reference_runs

STEPS = 3


class Small(torch.nn.Module):
    """The bias of the keys has a gradient of zero in theory (softmax does not see it), which AdamW makes steps of."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(16, 16) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        y = (scores.softmax(-1) @ self.value(x)).flatten(0, 1)
        return self.norm(torch.relu(y)).pow(4).mean()


def setting(dtype: torch.dtype = torch.float32):
    torch.manual_seed(3)
    model, x = Small().to(dtype), torch.randn(32, 8, 16, dtype=dtype)
    references = reference_runs(model, (x,), {}, STEPS)
    return model, x, references


def reordered(model, x, steps: int = STEPS):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    return train(copy.deepcopy(model), (x[order],), {}, steps, keep=True)


def judged(references, run):
    return compare(references.truth, run, references.start, references.one)


def wrong(references, run) -> set[tuple[str, str]]:
    return {(item.what, item.name) for item in judged(references, run) if not item.agrees}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_order_of_sums_agrees(dtype):
    model, x, references = setting(dtype)
    run = reordered(model, x)
    assert not wrong(references, run)
    kinds = {item.what for item in judged(references, run)}
    assert kinds == {"loss", "gradient", "parameter", "update", "buffer"}


def test_the_model_is_left_as_it_was():
    model, _, references = setting()
    assert all(torch.equal(parameter, references.start[name]) for name, parameter in model.named_parameters())


def test_float32_is_measured_by_one_process():
    model, x, references = setting()
    found = judged(references, reordered(model, x))
    assert all(item.allowed == TIMES * item.yardstick for item in found if item.yardstick)
    weights = [item for item in found if item.what == "gradient" and "value.weight" in item.name]
    assert weights and all(item.allowed < 1e-4 * item.size for item in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_gradient_is_found(dtype):
    model, x, references = setting(dtype)
    run = reordered(model, x)
    run.gradients[1]["value.weight"] *= 1 + (1e-3 if dtype == torch.float32 else 1e-8)
    assert ("gradient", "value.weight at step 2") in wrong(references, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_optimiser_is_found(dtype):
    """Even in a parameter whose direct comparison AdamW's amplification makes blunt."""
    model, x, references = setting(dtype)
    run = reordered(model, x)
    run.parameters["key.bias"] += 1e-5
    assert ("update", "key.bias") in wrong(references, run)


def test_wrong_losses_and_buffers_are_found():
    model, x, references = setting()
    run = reordered(model, x)
    run.losses[2] *= 1.001
    run.buffers["norm.running_mean"] += 1e-3
    run.buffers["norm.num_batches_tracked"] += 1
    expected = {("loss", "step 3"), ("buffer", "norm.running_mean"), ("buffer", "norm.num_batches_tracked")}
    assert wrong(references, run) == expected


def test_missing_tensors_and_nans_are_found():
    model, x, references = setting()
    run = reordered(model, x)
    del run.gradients[0]["query.bias"]
    run.parameters["value.bias"][0] = float("nan")
    found = wrong(references, run)
    assert {("gradient", "query.bias at step 1"), ("parameter", "value.bias"), ("update", "value.bias")} <= found


def test_half_a_batch_is_found():
    """The classical mistake: every rank's mean taken for the whole batch's."""
    model, x, references = setting()
    run = train(copy.deepcopy(model), (x[:16],), {}, STEPS, keep=True)
    found = wrong(references, run)
    assert ("loss", "step 1") in found and ("gradient", "value.weight at step 1") in found


def test_replay_is_the_optimiser():
    model, x, references = setting()
    run = reordered(model, x)
    for name, parameter in replayed(references.start, run).items():
        torch.testing.assert_close(parameter, run.parameters[name], rtol=1e-6, atol=1e-8)
