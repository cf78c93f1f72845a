"""What all ranks saw, put together: one run with whole tensors, and who holds which copy of each number.

Everything lies in the model's places: a row with one number per element of its parameters. What several tensors hold (a
replicated weight, a tied one that two stages keep) is there once per holder, so that the sum of the copies, their mean, and
how far they are apart can be asked of any set of places.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.errors import RunError
from shardwright.verification.batches import Batch, Steps
from shardwright.verification.candidates.observing import Dropouts, Held, Seen
from shardwright.verification.candidates.protocol import own_rows
from shardwright.verification.candidates.recognising import NOBODY, Model, Numbers, Places, flat
from shardwright.verification.gathering import distance
from shardwright.verification.judging import twin_of
from shardwright.verification.prepare import all_double
from shardwright.verification.recorded import Copies, Run, Training, retraced, size_of

EXACT = 1e-7
"""Two readings of one cause agree to this share of their size: float64 leaves ten thousand times less, mistakes far more."""


class Holder:
    """One tensor of one rank."""

    def __init__(self, rank: int, held: Held) -> None:
        self.rank, self.name, self.held = rank, held.name, held
        self.mine = np.flatnonzero(held.places != NOBODY)
        self.places: Places = held.places[self.mine]

    def numbers(self, kind: str, step: int) -> Numbers | None:
        """Its ``before``, ``gradients`` or ``handed`` of a step, for its places."""
        series: list[Numbers | None] = getattr(self.held, kind)
        row = series[step] if step < len(series) else None
        return None if row is None else row[self.mine]


class Evidence:
    """All ranks' runs and the model that they should have trained."""

    def __init__(self, model: nn.Module, steps: Steps, seen: Sequence[Seen]) -> None:
        self.model, self.steps, self.seen = model, steps, seen
        self.parameters = dict(model.named_parameters())
        self.known = Model(self.parameters)
        self.holders = [Holder(rank.rank, held) for rank in seen for held in rank.held.values()]
        self.parts = max(rank.rows[1] for rank in seen)
        self.ranks = len(seen)
        self.calls = max(rank.calls for rank in seen)
        self.run = self._run()

    @functools.cached_property
    def copies(self) -> Numbers:
        """How many tensors hold each number."""
        return self.added(lambda holder: np.ones(len(holder.places)))

    def added(self, numbers: Callable[[Holder], Numbers | None]) -> Numbers:
        """The sum over all holders, in the model's places."""
        row = np.zeros(self.known.size)
        for holder in self.holders:
            found = numbers(holder)
            if found is not None:
                np.add.at(row, holder.places, found)
        return row

    def row(self, kind: str, step: int) -> Numbers:
        """What the first holder of each number has of it; what nobody has is not a number."""
        row = np.full(self.known.size, np.nan)
        for holder in reversed(self.holders):
            found = holder.numbers(kind, step)
            if found is not None:
                row[holder.places] = found
        return row

    def apart(self, kind: str, step: int, row: Numbers | None = None) -> Iterator[tuple[str, float, int]]:
        """By parameter, how far a copy is from the first one (or from ``row``) at most, and the rank that holds it."""
        row = self.row(kind, step) if row is None else row
        worst: dict[str, tuple[float, int]] = {}
        for holder in self.holders:
            found = holder.numbers(kind, step)
            for name in self.known.names(holder.places):
                span = self.known.spans[name]
                here = (holder.places >= span.start) & (holder.places < span.stop)
                if found is None:
                    missing = not np.isnan(row[holder.places[here]]).all()
                    spread = math.inf if missing and np.nanmax(np.abs(row[holder.places[here]])) > 0 else 0.0
                else:
                    differences = np.abs(found[here] - row[holder.places[here]])
                    spread = float(np.nan_to_num(differences, nan=math.inf).max(initial=0.0))
                if spread > worst.get(name, (-1.0, 0))[0]:
                    worst[name] = (spread, holder.rank)
        for name, (spread, rank) in worst.items():
            yield name, spread, rank

    def names_of(self, parameter: str) -> list[str]:
        """The names under which the ranks hold a parameter."""
        span = self.known.spans[parameter]
        inside = [h for h in self.holders if bool(((h.places >= span.start) & (h.places < span.stop)).any())]
        return list(dict.fromkeys(holder.name for holder in inside))

    def held_by(self, parameter: str) -> list[Holder]:
        """The tensors with numbers of a parameter, those of low ranks first."""
        span = self.known.spans[parameter]
        return [h for h in self.holders if bool(((h.places >= span.start) & (h.places < span.stop)).any())]

    def loss(self, step: int) -> float:
        """The batch's, made of those that ranks return: once for every part of the rows."""
        parts: dict[int, float] = {}
        for rank in self.seen:
            value = rank.losses[step]
            if value is not None:
                parts.setdefault(rank.rows[0], value)
        if not parts:
            raise RunError(
                "No rank returned a loss, so that there is nothing to compare.",
                "Let backward() return the loss of this rank's rows on the rank that has it.",
            )
        return sum(parts.values()) / (len(parts) if self.seen[0].losses_are == "mean" else 1)

    def _run(self) -> Run:
        run, count = Run(), len(self.steps)
        for step in range(count):
            run.losses.append(self.loss(step))
            run.before.append(self.known.parts(self.row("before", step)))
            run.gradients.append(self.known.parts(self.row("gradients", step)))
            run.outputs.append({})
            run.draws.append([[] for _ in self.steps[step]])
            run.copies += self._copies("parameter", "before", step, f" before step {step + 1}")
            run.copies += self._copies("gradient", "gradients", step, f" at step {step + 1}")
            run.copies += self._loss_copies(step)
        run.parameters = self.known.parts(self.row("before", count))
        run.copies += self._copies("parameter", "before", count, " at the end")
        for rank in self.seen:
            for name, buffer in rank.buffers.items():
                tensor = torch.from_numpy(np.array(buffer))
                first = run.buffers.setdefault(name, tensor)
                spread = distance(first, tensor)
                if spread:
                    run.copies.append(Copies("buffer", f"{name} at the end", spread, rank.rank, size_of(first)))
        return run

    def _copies(self, what: str, kind: str, step: int, when: str) -> list[Copies]:
        row = self.row(kind, step)
        found = []
        for name, spread, rank in self.apart(kind, step):
            size = float(np.nan_to_num(np.abs(row[self.known.spans[name]])).max(initial=0.0))
            found.append(Copies(what, name + when, spread, rank, size))
        return found

    def _loss_copies(self, step: int) -> list[Copies]:
        first: dict[int, float] = {}
        found = []
        for rank in self.seen:
            value = rank.losses[step]
            if value is not None:
                one = first.setdefault(rank.rows[0], value)
                found.append(Copies("loss", f"loss at step {step + 1}", abs(value - one), rank.rank, abs(one)))
        return found

    def one_process(self, step: int, batch: Batch | None = None) -> Run:
        """One process on a batch (that of the step, unless given), at the parameters that the ranks had before the step."""
        return self._retraced(step, batch or self.steps[step][0], self._before(step))

    def on_rows(self, step: int, which: int, count: int) -> Run:
        """One process on one of so many parts of the step's batch."""
        batch = self.steps[step][0]
        return self.one_process(step, Batch(*own_rows(batch.args, batch.kwargs, which, count)))

    def _before(self, step: int) -> dict[str, Tensor]:
        row = self.row("before", step)
        return {name: tensor.detach().double() for name, tensor in self.parameters.items()} | self.known.parts(row)

    def _retraced(self, step: int, batch: Batch, before: dict[str, Tensor]) -> Run:
        twin, ((own,),) = twin_of(self.model, [[batch]], wide=True)
        with all_double(), Dropouts(on=False):
            return retraced(twin, [own], before, inputs=False, scale=1.0)

    def gradient(self, run: Run) -> Numbers:
        """The gradients of a run on one process in one row; zero where a parameter has none."""
        return np.nan_to_num(self.known.row({name: flat(tensor) for name, tensor in run.gradients[0].items()}))


@dataclass(frozen=True)
class Theirs:
    """How one process trains as the candidate does: its optimizer with the same options in every step, its clipping."""

    kind: type[torch.optim.Optimizer]
    options: Sequence[dict[str, dict[str, Any]]]
    clip: float | None

    def training(self) -> Training:
        return Training(1.0, self.optimizer, self.before_update, roundings=1e5)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": [tensor], "name": name, **self._of(name, 0)} for name, tensor in parameters.items()]
        return self.kind(groups)  # type: ignore[call-arg]  # that of the base class asks for more

    def before_update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group.update(self._of(group["name"], step))
        if self.clip is not None:
            every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(every, self.clip)

    def _of(self, name: str, step: int) -> dict[str, Any]:
        known = self.options[min(step, len(self.options) - 1)] if self.options else {}
        return known.get(name) or known.get("") or {}


def theirs_of(seen: Sequence[Seen]) -> Theirs:
    """How the candidate updates, put together from what the ranks know of their own parameters."""
    kinds = [rank.optimizer for rank in seen if rank.optimizer is not None]
    if not kinds:
        raise RunError(
            "The candidate's update() uses no optimizer that could be asked for its options.",
            "Give Candidate(optimizer=…), so that one process can do the same.",
        )
    steps = max(len(rank.options) for rank in seen)
    options: list[dict[str, dict[str, Any]]] = [{} for _ in range(steps)]
    for rank in seen:
        for step, known in enumerate(rank.options):
            options[step] = {**known, **options[step]}
    return Theirs(kinds[0], options, seen[0].clip)
