"""A training run against one process: every number of both, and how far each may be from the truth.

The truth is one process running the unmodified model in float64. A run in float64 must stay within 1e-9 of it for all steps,
or, where rounding leads one process away from itself (see below), within 1e-9 in every step from where that began.
A run in float32 adds its numbers in another order than one process does, so it is held to the error that one process
makes in float32 itself: its distance from the truth may be at most :data:`TIMES` that of the one process (as accurate as the
algorithm it replaces, the yardstick of numerical analysis; Higham, Accuracy and Stability, 2002, chapter 1). A number
that is exact on one process by luck is measured by the median relative error of its kind, a gradient that is zero in
theory by one rounding of the model's largest gradient, and the running mean of numbers whose mean is zero in theory (they
come from another batch norm) by one rounding of their spread, which the running variance beside it tells.

AdamW turns rounding of tiny gradients into whole steps, on one process as on many, so in float32 truth and yardstick are
taken anew at the parameters the run had before each step. What remains is the optimizer: in either precision every
parameter after every step must be what AdamW on one process makes of the run's own gradients, up to a few roundings.
Each step's start, gradients and end being right, so is the run. Last, all ranks must hold the same copy of what several of
them hold.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardwright.verification.forced import Cut
from shardwright.verification.gathering import distance
from shardwright.verification.recorded import LEARNING_RATE, OURS, Run, Training, replayed, size_of

TIMES = 4.0
DOUBLE = 1e-9
NOISE = 1e-3
"""In float64, a gradient that is zero in theory is measured by this share of the model's largest gradient."""
KINDS = ("loss", "output", "gradient", "parameter", "update", "buffer", "copy", "stream")


@dataclass(frozen=True)
class Comparison:
    """One compared tensor: its largest distance from the truth, the truth's size, what was allowed.

    ``yardstick`` is the error of one process in the same precision (zero where the limit is relative to ``size``);
    ``kink`` says that the truth is that of parameters one rounding away (:mod:`shardwright.verification.kinks`).
    """

    what: str
    name: str
    difference: float
    size: float
    allowed: float
    yardstick: float = 0.0
    kink: bool = False

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed

    @property
    def relative(self) -> float:
        return self.difference / self.size if self.size else self.difference

    @property
    def times(self) -> float:
        """How many times the error of one process this is; zero where no such yardstick is used."""
        return self.difference / self.yardstick if self.yardstick else 0.0


@dataclass(frozen=True)
class Verification:
    """Everything compared about one strategy.

    ``communication`` counts what was sent: per kind, steps and bytes of one training step. ``cut`` says how much of the
    work the strategy cuts: where that is nothing, agreement means little.
    """

    comparisons: tuple[Comparison, ...]
    losses: tuple[float, ...]
    dtype: str
    communication: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    name: str = "found"
    cut: Cut | None = None

    @property
    def agrees(self) -> bool:
        return bool(self.comparisons) and all(item.agrees for item in self.comparisons)

    def closest(self) -> Comparison:
        """The comparison that comes closest to its limit: of numbers, where random ones are as they should be."""
        numbers = [item for item in self.comparisons if item.what != "stream" or not item.agrees]
        return max(numbers or self.comparisons, key=lambda item: item.difference / (item.allowed or 1e-300))

    def worst(self, what: str) -> Comparison | None:
        """The comparison of a kind (one of :data:`KINDS`) that comes closest to its limit."""
        of_kind = [item for item in self.comparisons if item.what == what]
        return max(of_kind, key=lambda item: item.difference / (item.allowed or 1e-300), default=None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "strategy": self.name,
            "agrees": self.agrees,
            "cut": asdict(self.cut) if self.cut is not None else None,
            "dtype": self.dtype,
            "losses": list(self.losses),
            "compared": len(self.comparisons),
            "worst": {what: asdict(worst) for what in KINDS if (worst := self.worst(what)) is not None},
            "disagreeing": [asdict(item) for item in self.comparisons if not item.agrees],
            "communication": {kind: list(amount) for kind, amount in self.communication.items()},
        }


def compare(
    truth: Run, other: Run, start: Mapping[str, Tensor], one: Run | None = None, how: Training = OURS
) -> list[Comparison]:
    """Every loss, output, gradient, parameter and buffer of a run against the truth; what only one of them has disagrees.

    ``start`` are the parameters before the first step. With ``one``, the run of one process in the precision of ``other``,
    both ``truth`` and ``one`` start every step where ``other`` did
    (:func:`~shardwright.verification.recorded.retraced`); without it ``other`` is in float64 and must agree within 1e-9.
    """
    rounding = max((torch.finfo(tensor.dtype).eps for tensor in start.values()), default=torch.finfo(torch.float32).eps)
    found: list[Comparison] = []
    for step in range(len(truth.gradients)):
        for what in ("output", "gradient"):
            true, theirs, single = (_at(run, what, step) for run in (truth, other, one))
            assert true is not None and theirs is not None
            if what == "output" and single is not None:  # which of two numbers is larger may be a matter of rounding
                true, theirs = _measured(true), _measured(theirs)
            floor = max((size_of(tensor) for tensor in true.values()), default=0.0)
            found += _compared(what, true, theirs, single, rounding, dict.fromkeys(true, floor))
    losses, their_losses, single_losses = (_numbers(run) for run in (truth, other, one))
    assert losses is not None and their_losses is not None
    worst = max([rounding, *_relative_errors(losses, single_losses)])
    found += _compared("loss", losses, their_losses, single_losses, worst)
    if one is None:
        found += _compared("parameter", truth.parameters, other.parameters, None, rounding, unit=LEARNING_RATE)
    for step, expected in enumerate(replayed(start, other, how), 1):
        after = other.before[step] if step < len(other.before) else other.parameters
        for name in sorted(expected.keys() | after.keys()):
            size = size_of(expected.get(name)) + LEARNING_RATE
            difference = distance(expected.get(name), after.get(name))
            allowed = how.roundings * rounding * size
            found.append(Comparison("update", f"{name} at step {step}", difference, size, allowed))
    own = one.buffers if one is not None else None
    found += _compared("buffer", truth.buffers, other.buffers, own, rounding, _spreads(truth.buffers))
    return found + _copies(other, DOUBLE if one is None else TIMES * rounding)


Tensors = Mapping[str, Tensor]


def _compared(
    what: str,
    true: Tensors,
    theirs: Tensors,
    single: Tensors | None,
    typical: float,
    floors: Mapping[str, float] = MappingProxyType({}),
    *,
    unit: float = 0.0,
) -> list[Comparison]:
    """Tensors of one kind. ``floors`` are the sizes of what cancels in a tensor of zeros, ``unit`` is added to every size.

    ``typical`` is the least relative error to reckon with.
    """
    found = []
    noises = {name: typical * floor for name, floor in floors.items()}
    typical = max(typical, statistics.median(_relative_errors(true, single, unit, noises) or [0.0]))
    for name in sorted(true.keys() | theirs.keys()):
        tensor, yardstick = true.get(name), 0.0
        size, floor, noise = size_of(tensor) + unit, floors.get(name, 0.0), noises.get(name, 0.0)
        allowed = DOUBLE * (size + NOISE * floor)
        if single is not None:
            yardstick = max(distance(tensor, single.get(name)), typical * size, noise)
            allowed = TIMES * yardstick if math.isfinite(yardstick) else 0.0
        if tensor is not None and not (tensor.is_floating_point() or tensor.is_complex()):
            allowed = yardstick = 0.0
        found.append(Comparison(what, name, distance(tensor, theirs.get(name)), size, allowed, yardstick))
    return found


def _relative_errors(
    true: Tensors, single: Tensors | None, unit: float = 0.0, noises: Mapping[str, float] = MappingProxyType({})
) -> list[float]:
    """How far one process is from the truth, tensor by tensor, for those that are larger than their noise."""
    sizes = {name: size_of(tensor) + unit for name, tensor in true.items() if single is not None}
    larger = {name: size for name, size in sizes.items() if size > noises.get(name, 0.0)}
    return [distance(true[name], (single or {}).get(name)) / size for name, size in larger.items()]


def _spreads(buffers: Tensors) -> dict[str, float]:
    """How far the numbers lie apart whose mean a buffer holds, for the running means of batch norms."""
    variances = {name.removesuffix(_VARIANCE) + _MEAN: t for name, t in buffers.items() if name.endswith(_VARIANCE)}
    return {name: math.sqrt(size_of(variance)) for name, variance in variances.items()}


_MEAN, _VARIANCE = "running_mean", "running_var"


def _at(run: Run | None, what: str, step: int) -> Tensors | None:
    """The outputs or gradients of one step, the step in their names."""
    if run is None:
        return None
    tensors = (run.outputs if what == "output" else run.gradients)[step]
    return {f"{name} at step {step + 1}": tensor for name, tensor in tensors.items()}


def _measured(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if t.is_floating_point() or t.is_complex()}


def _copies(run: Run, relative: float) -> list[Comparison]:
    """What several ranks hold must be one tensor; ``relative`` is how far copies may differ, in units of its size."""
    floors: dict[str, float] = {}
    for copies in run.copies:
        floors[copies.what] = max(floors.get(copies.what, 0.0), copies.size)
    return [
        Comparison(
            "copy",
            f"{copies.what} {copies.name}" + f", rank {copies.rank}" * bool(copies.spread),
            copies.spread,
            copies.size,
            relative * (copies.size + NOISE * floors[copies.what]),
        )
        for copies in run.copies
    ]


def _numbers(run: Run | None) -> Tensors | None:
    steps = enumerate(run.losses, 1) if run is not None else ()
    return None if run is None else {f"step {n}": torch.tensor(loss, dtype=torch.float64) for n, loss in steps}
