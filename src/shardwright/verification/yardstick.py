"""The error that one process makes in float32, from several evaluations that are equally good.

One evaluation is one draw of its rounding errors, and in a tensor of few elements it may be right by luck: a batch norm's
four weights were seen ten times closer to the truth than at the parameters next to them. Where a gradient exceeds what one
evaluation allows, more are drawn: at parameters each of which is the next or the previous float32 number, against float64
at those same parameters. The largest error of all is the yardstick. (The verdict is that of drawing them always: a larger
yardstick changes nothing where the first one suffices.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.verification.compare import TIMES, Comparison
from shardwright.verification.recorded import Run

DRAWS = 4


def drawn_again(
    found: Sequence[Comparison], run: Run, errors_at: Callable[[int, Mapping[str, Tensor]], Mapping[str, float]]
) -> list[Comparison]:
    """The comparisons, with the largest error of several draws for the gradients of every step where one is exceeded.

    ``errors_at`` gives the errors of one process in the run's precision at given parameters, per gradient,
    in a step (counted from zero).
    """
    found = list(found)
    for step, before in enumerate(run.before):
        suffix = f" at step {step + 1}"
        mine = [item for item in found if item.what == "gradient" and item.name.endswith(suffix)]
        if all(item.agrees or math.isinf(item.difference) for item in mine):
            continue
        largest: dict[str, float] = {}
        for draw in range(DRAWS):
            for name, error in errors_at(step, neighbour(before, draw)).items():
                largest[name + suffix] = max(error, largest.get(name + suffix, 0.0))
        of_step = {id(item) for item in mine}
        found = [_measured(item, largest.get(item.name, 0.0)) if id(item) in of_step else item for item in found]
    return found


def _measured(item: Comparison, error: float) -> Comparison:
    if not item.yardstick or not math.isfinite(error) or error <= item.yardstick:
        return item
    return replace(item, yardstick=error, allowed=TIMES * error)


def neighbour(parameters: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every number replaced by the next or the previous one of its precision, at random."""
    dice = torch.Generator().manual_seed(seed)
    moved = {}
    for name, parameter in parameters.items():
        numbers = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        up = torch.rand(numbers.shape, generator=dice) < 0.5
        numbers = torch.nextafter(numbers, torch.where(up, math.inf, -math.inf).to(numbers.dtype))
        moved[name] = torch.view_as_complex(numbers) if parameter.is_complex() else numbers
    return moved
