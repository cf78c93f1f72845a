"""Gradients beside a kink: where they jump, one rounding decides between two right answers.

The derivative of a ReLU, a maximum or a routing decision jumps where its argument crosses zero. A float32 run whose argument
is within rounding of that point may stand on the other side than float64 does, and its gradients then differ by the jump,
not by rounding. Such gradients are right when they are the exact gradients of a nearby question (backward stability; Higham
2002, section 1.5): one process in float64, with the open answers (`decisions.py`) that explain the
run given the other way, must give every gradient of that step within the limits that held before. Kinks of other
operators are looked for at parameters that differ from the run's by about one rounding each.

The same holds for the yardstick: where one process in float32 answers otherwise than float64, its error is measured from
the exact gradients of its own answers, lest a jump be taken for rounding and excuse mistakes of its size.

One evaluation is one draw of its rounding errors, and in a tensor of few elements it may be right by luck: a batch norm's
four weights were seen ten times closer to the truth than at the parameters next to them. Where a gradient exceeds what one
evaluation allows, more are drawn (:func:`drawn_again`): at parameters each of which is the next or the previous float32
number, against float64 at those same parameters. The largest error of all is the yardstick. (The verdict is that of drawing
them always: a larger yardstick changes nothing where the first one suffices.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.verification.compare import TIMES, Comparison
from shardwright.verification.decisions import Jump
from shardwright.verification.gathering import distance
from shardwright.verification.recorded import Run

ATTEMPTS = 16
"""How many nearby parameters are tried."""
MOST_JUMPS = 64
"""How many open answers are tried, nearest first."""

Gradients = Mapping[str, Tensor]
GradientsAt = Callable[[int, Mapping[str, Tensor], Sequence[Jump]], Gradients]
"""The true gradients of a step (counted from zero) at given parameters, with some answers given the other way."""


def from_its_own_side(one: Run, truth: Run, open_answers: Sequence[Sequence[Jump]], gradients_at: GradientsAt) -> Run:
    """The run of one process with every jump taken out: the truth plus its error from the truth of its own answers."""
    gradients = list(one.gradients)
    for step, (own, true) in enumerate(zip(one.gradients, truth.gradients, strict=True)):
        crossed = [jump for jump in open_answers[step] if jump.crossed]
        if crossed:
            own_truth = gradients_at(step, one.before[step], crossed)
            gradients[step] = {
                name: true[name] + (gradient.to(true[name].dtype) - own_truth[name])
                if name in true and name in own_truth
                else gradient
                for name, gradient in own.items()
            }
    return replace(one, gradients=gradients)


def beside_kinks(
    found: Sequence[Comparison], run: Run, open_answers: Sequence[Sequence[Jump]], gradients_at: GradientsAt
) -> list[Comparison]:
    """The comparisons, those of a step with wrong gradients replaced where other answers explain all of them.

    ``open_answers`` are, per step, those that float32 leaves open.
    """
    found = list(found)
    for step, theirs in enumerate(run.gradients):
        suffix = f" at step {step + 1}"
        mine = [item for item in found if item.what == "gradient" and item.name.endswith(suffix)]
        if all(item.agrees for item in mine) or any(math.isinf(item.difference) for item in mine):
            continue

        def measured(true: Gradients) -> list[Comparison]:
            named = [(item, item.name.removesuffix(suffix)) for item in mine]  # noqa: B023
            return [replace(i, difference=distance(true.get(n), theirs.get(n)), kink=True) for i, n in named]  # noqa: B023

        here = functools.partial(gradients_at, step)
        for nearby in _nearby(mine, run.before[step], open_answers[step], here, measured):
            if all(item.agrees for item in nearby):
                found = [item for item in found if item not in mine] + nearby
                break
    return found


def _nearby(
    mine: list[Comparison],
    before: Mapping[str, Tensor],
    open_answers: Sequence[Jump],
    gradients_at: Callable[[Mapping[str, Tensor], Sequence[Jump]], Gradients],
    measured: Callable[[Gradients], list[Comparison]],
) -> Iterator[list[Comparison]]:
    """The same gradients compared with nearby truths: one answer after the other turned where that brings them closer."""
    turned: list[Jump] = []
    best = _misfit(mine)
    for jump in open_answers[:MOST_JUMPS]:
        nearby = measured(gradients_at(before, [*turned, jump]))
        yield nearby
        if _misfit(nearby) < best:
            best, turned = _misfit(nearby), [*turned, jump]
    for attempt in range(ATTEMPTS):
        yield measured(gradients_at(shaken(before, attempt), ()))


def _misfit(items: Sequence[Comparison]) -> float:
    return sum(item.difference / (item.allowed or 1e-300) for item in items)


def shaken(parameters: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Parameters that differ from these by about one rounding of their precision each, themselves in float64."""
    dice = torch.Generator().manual_seed(seed)
    moved = {}
    for name, parameter in parameters.items():
        noise = torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
        wide = torch.complex128 if parameter.is_complex() else torch.float64
        moved[name] = parameter.to(wide) * (1 + noise * torch.finfo(parameter.dtype).eps)
    return moved


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
