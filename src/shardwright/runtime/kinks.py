"""Gradients beside a kink: where they jump, one rounding decides between two right answers.

The derivative of a ReLU, a maximum or a routing decision jumps where its argument crosses zero. A float32 run whose argument
is within rounding of that point may stand on the other side than float64 does, and its gradients then differ by the jump,
not by rounding. Such gradients are right when they are the exact gradients of a nearby question (backward stability; Higham
2002, section 1.5): one process in float64, at parameters that differ from the run's by about one rounding each, must give
every gradient of that step within the limits that held before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.runtime.compare import Comparison, distance
from shardwright.runtime.recorded import Run

ATTEMPTS = 16


def beside_kinks(
    found: Sequence[Comparison], run: Run, gradients_at: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> list[Comparison]:
    """The comparisons, those of a step with wrong gradients replaced where nearby parameters explain all of them.

    ``gradients_at`` computes the true gradients at given parameters.
    """
    found = list(found)
    for step, theirs in enumerate(run.gradients):
        suffix = f" at step {step + 1}"
        mine = [item for item in found if item.what == "gradient" and item.name.endswith(suffix)]
        if all(item.agrees for item in mine) or any(math.isinf(item.difference) for item in mine):
            continue
        for attempt in range(ATTEMPTS):
            true = gradients_at(shaken(run.before[step], attempt))
            names = [item.name.removesuffix(suffix) for item in mine]
            pairs = zip(mine, names, strict=True)
            nearby = [replace(i, difference=distance(true.get(n), theirs.get(n)), kink=True) for i, n in pairs]
            if all(item.agrees for item in nearby):
                found = [item for item in found if item not in mine] + nearby
                break
    return found


def shaken(parameters: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Parameters that differ from these by about one rounding of their precision each, themselves in float64."""
    dice = torch.Generator().manual_seed(seed)
    moved = {}
    for name, parameter in parameters.items():
        noise = torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
        moved[name] = parameter.double() * (1 + noise * torch.finfo(parameter.dtype).eps)
    return moved
