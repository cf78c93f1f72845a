"""What counts as the same numbers: other orders of summation do, mistakes of any kind do not.

A batch whose rows stand in another order is summed in another order, as on several devices, without any of them.
"""

from __future__ import annotations

import copy

import pytest
import torch

from shardwright.verification.batches import repeated
from shardwright.verification.compare import TIMES
from shardwright.verification.judging import judged
from shardwright.verification.recorded import train

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
    return Small().to(dtype), torch.randn(32, 8, 16, dtype=dtype)


def reordered(model, x, steps: int = STEPS):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    run = train(copy.deepcopy(model), repeated((x[order],), {}, steps), keep=True)
    for gradients in run.gradients:
        gradients |= {name: g[order.argsort()] for name, g in gradients.items() if name.startswith("input")}
    return run


def wrong(model, x, run) -> set[tuple[str, str]]:
    return {
        (item.what, item.name) for item in judged(model, repeated((x,), {}, len(run.losses)), run) if not item.agrees
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_order_of_sums_agrees(dtype):
    model, x = setting(dtype)
    run = reordered(model, x)
    assert not wrong(model, x, run)
    kinds = {item.what for item in judged(model, repeated((x,), {}, len(run.losses)), run)}
    direct = {"parameter"} if dtype == torch.float64 else set()
    assert kinds == {"loss", "output", "gradient", "update", "buffer"} | direct


class Loud(Small):
    """Gradients so large that the rounding in those that are zero in theory is no longer small to AdamW."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1e8 * super().forward(x)


def test_rounding_that_the_optimizer_makes_steps_of_agrees_and_mistakes_beside_it_do_not():
    """One process whose batch is in another order drifts by more than 1e-9 in float64; each of its steps is right."""
    torch.manual_seed(3)
    model, x = Loud().double(), torch.randn(32, 8, 16, dtype=torch.float64)
    run, alone = reordered(model, x), train(copy.deepcopy(model), repeated((x,), {}, STEPS), keep=True)
    assert max(float((alone.parameters[name] - p).abs().max()) for name, p in run.parameters.items()) > 1e-8
    assert not wrong(model, x, run)
    run.gradients[2]["value.weight"] *= 1 + 1e-8
    assert ("gradient", "value.weight at step 3") in wrong(model, x, run)


def test_the_model_is_left_as_it_was():
    model, x = setting()
    before = copy.deepcopy(model.state_dict())
    judged(model, repeated((x,), {}, STEPS), reordered(model, x))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_float32_is_measured_by_one_process():
    model, x = setting()
    found = judged(model, repeated((x,), {}, STEPS), reordered(model, x))
    assert all(item.allowed == TIMES * item.yardstick for item in found if item.yardstick)
    weights = [item for item in found if item.what == "gradient" and "value.weight" in item.name]
    assert weights and all(item.allowed < 1e-4 * item.size for item in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_gradient_is_found(dtype):
    model, x = setting(dtype)
    run = reordered(model, x)
    run.gradients[1]["value.weight"] *= 1 + (1e-4 if dtype == torch.float32 else 1e-8)
    assert ("gradient", "value.weight at step 2") in wrong(model, x, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_optimizer_is_found(dtype):
    """Even in a parameter whose direct comparison AdamW's amplification makes blunt."""
    model, x = setting(dtype)
    run = reordered(model, x)
    run.parameters["key.bias"] += 1e-5
    assert ("update", "key.bias at step 3") in wrong(model, x, run)


def test_wrong_losses_and_buffers_are_found():
    model, x = setting()
    run = reordered(model, x)
    run.losses[2] *= 1.001
    run.buffers["norm.running_mean"] += 1e-3
    run.buffers["norm.num_batches_tracked"] += 1
    expected = {("loss", "step 3"), ("buffer", "norm.running_mean"), ("buffer", "norm.num_batches_tracked")}
    assert wrong(model, x, run) == expected


class Normalised(torch.nn.Module):
    """The second batch norm sees numbers whose mean is zero in theory; the output has unit length, whatever led to it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16, bias=False), torch.nn.BatchNorm1d(16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(self.body(x.flatten(0, 1)), dim=-1)


@pytest.mark.parametrize(("dtype", "mistake"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_a_mean_of_zero_is_measured_by_what_it_is_the_mean_of(dtype, mistake):
    model, x = Normalised().to(dtype), setting(dtype)[1]
    run, turned = (train(copy.deepcopy(model), repeated((rows,), {}, 1), keep=True) for rows in (x, x.roll(3, 0)))
    assert not torch.equal(run.buffers["body.2.running_mean"], turned.buffers["body.2.running_mean"])
    run.buffers = turned.buffers
    assert not wrong(model, x, run)
    run.buffers["body.2.running_mean"] += mistake
    assert wrong(model, x, run) == {("buffer", "body.2.running_mean")}


def test_what_a_norm_has_made_is_trained_on_as_well():
    model, x = Normalised().double(), setting(torch.float64)[1]
    gradients = train(copy.deepcopy(model), repeated((x,), {}, 1), keep=True).gradients[0]
    assert gradients["body.1.weight"].abs().max() > 1e-6


def test_missing_tensors_and_nans_are_found():
    model, x = setting()
    run = reordered(model, x)
    del run.gradients[0]["query.bias"]
    run.parameters["value.bias"][0] = float("nan")
    found = wrong(model, x, run)
    assert {("gradient", "query.bias at step 1"), ("update", "value.bias at step 3")} <= found


def test_what_is_not_finite_on_one_process_either_does_not_agree():
    """No yardstick, no agreement: float32 overflows here on one process, float64 does not."""
    model, x = torch.nn.Linear(4, 1), torch.full((2, 4), 1e30)
    run = train(copy.deepcopy(model), repeated((x,), {}, 1), keep=True)
    assert ("loss", "step 1") in wrong(model, x, run)


def test_a_run_that_leaves_its_path_is_found():
    """A step that starts elsewhere than the last one ended: its gradients are right there, its start is not."""
    model, x = setting()
    first, second = reordered(model, x, 1), reordered(model, x, 2)
    with torch.no_grad():
        model.value.bias += 0.01
    moved = reordered(model, x, 2)
    with torch.no_grad():
        model.value.bias -= 0.01
    second.before[1], second.gradients[1], second.losses[1] = moved.before[1], moved.gradients[1], moved.losses[1]
    assert ("update", "value.bias at step 1") in wrong(model, x, second)
    assert not wrong(model, x, first)


def test_half_a_batch_is_found():
    """The classical mistake: every rank's mean taken for the whole batch's."""
    model, x = setting()
    run = train(copy.deepcopy(model), repeated((x[:16],), {}, STEPS), keep=True)
    found = wrong(model, x, run)
    assert ("loss", "step 1") in found and ("gradient", "value.weight at step 1") in found


class Kinked(torch.nn.Module):
    """One unit whose input is zero up to rounding, beside others that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[0.3, 0.7, -1.0], [1.0, 0.5, 0.25]]))
        self.out = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor, sign: float = 1e-9) -> torch.Tensor:
        return (torch.relu(x @ self.weight.T + sign) @ self.out).sum()


def test_the_other_side_of_a_kink_is_right():
    """The input of the first unit is a rounding of 0.3 + 0.7 - 1: any weights one rounding away may flip it."""
    model, x = Kinked(), torch.ones(1, 3)
    run = train(copy.deepcopy(model), repeated((x, -1e-7), {}, 1), keep=True)
    other = train(copy.deepcopy(model), repeated((x, 1e-7), {}, 1), keep=True)
    assert not torch.equal(run.gradients[0]["weight"], other.gradients[0]["weight"])
    for side in (run, other):
        found = judged(model, repeated((x,), {}, 1), side)
        assert all(item.agrees for item in found if item.what == "gradient")
    assert any(item.kink for item in judged(model, repeated((x,), {}, len(run.losses)), run)) != any(
        item.kink for item in judged(model, repeated((x,), {}, 1), other)
    )


def test_a_kink_excuses_nothing_else():
    model, x = Kinked(), torch.ones(1, 3)
    run = train(copy.deepcopy(model), repeated((x, -1e-7), {}, 1), keep=True)
    run.gradients[0]["out"] = run.gradients[0]["out"] * 1.001
    assert ("gradient", "out at step 1") in wrong(model, x, run)


class Hearing(torch.nn.Module):
    """Says that what it makes of its input wants a gradient, as feature extractors for sound do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = x[:, None]
        wave.requires_grad = True
        return self.layer(wave).square().mean()


def test_a_model_that_wants_gradients_of_its_inputs_by_itself():
    model, x = Hearing().double(), torch.randn(3, 4, dtype=torch.float64)
    run = train(copy.deepcopy(model), repeated((x,), {}, 2), keep=True)
    (asked,) = (x for name, x in run.gradients[-1].items() if name.startswith("input "))
    assert asked.abs().max() > 0
