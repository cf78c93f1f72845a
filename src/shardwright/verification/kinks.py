"""Gradients beside a kink: where they jump, one rounding decides between two right answers.

The derivative of a ReLU, a maximum or a routing decision jumps where its argument crosses zero. A float32 run whose argument
is within rounding of that point may stand on the other side than float64 does, and its gradients then differ by the jump,
not by rounding. Such gradients are right when they are the exact gradients of a nearby question (backward stability; Higham
2002, section 1.5): one process in float64, with the open answers (`decisions.py`) that explain the
run given the other way, must give every gradient of that step within the limits that held before. Kinks of other
operators are looked for at parameters that differ from the run's by about one rounding each.

The same holds for the yardstick: where one process in float32 answers otherwise than float64, its error is measured from
the exact gradients of its own answers, lest a jump be taken for rounding and excuse mistakes of its size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.verification.compare import Comparison
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
