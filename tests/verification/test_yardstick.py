"""One lucky evaluation is not the measure of float32: more are drawn where it is exceeded, and only there."""

from __future__ import annotations

import torch

from shardwright.verification.compare import TIMES, Comparison
from shardwright.verification.kinks import DRAWS, drawn_again, neighbour
from shardwright.verification.recorded import Run

RUN = Run(before=[{"w": torch.ones(3)}, {"w": torch.ones(3)}])


def gradient(step: int, difference: float, yardstick: float = 1.0) -> Comparison:
    return Comparison("gradient", f"w at step {step}", difference, 1e3, TIMES * yardstick, yardstick)


def test_the_largest_draw_counts_in_the_step_that_needs_it():
    errors, asked = iter([0.5, 3.0, 1.0, 2.0]), []

    def errors_at(step, parameters):
        assert step == 1
        asked.append(parameters["w"])
        return {"w": next(errors)}

    others = [gradient(1, 3.9), Comparison("buffer", "w at step 2", 9.0, 1e3, 4.0, 1.0)]
    found = drawn_again([*others, gradient(2, 10.0)], RUN, errors_at)
    assert len(asked) == DRAWS and len({tuple(point.tolist()) for point in asked}) > 1
    assert found == [*others, gradient(2, 10.0, yardstick=3.0)] and found[-1].agrees


def test_mistakes_remain_mistakes():
    found = drawn_again([gradient(1, 100.0), gradient(2, float("inf"))], RUN, lambda step, parameters: {"w": 2.0})
    assert not any(item.agrees for item in found)
    broken = drawn_again([gradient(1, 100.0)], RUN, lambda step, parameters: {"w": float("inf")})
    assert broken == [gradient(1, 100.0)]


def test_neighbours_are_one_number_away():
    torch.manual_seed(0)
    parameters = {"w": torch.randn(200), "v": torch.zeros(3), "half": torch.randn(3, dtype=torch.bfloat16)}
    moved = neighbour(parameters, 1)
    back = {name: torch.nextafter(tensor, parameters[name]) for name, tensor in moved.items()}
    assert all(torch.equal(back[name], parameters[name]) for name in parameters)
    assert (moved["w"] > parameters["w"]).any() and (moved["w"] < parameters["w"]).any()
    assert not torch.equal(moved["w"], neighbour(parameters, 2)["w"])
    complex_one = {"c": torch.randn(3, dtype=torch.complex64)}
    assert 0 < (neighbour(complex_one, 1)["c"] - complex_one["c"]).abs().max() < 1e-6
