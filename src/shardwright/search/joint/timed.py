"""Compositions of stages timed as 1F1B, event by event, and improved by that.

The exact composition (:mod:`~shardwright.search.joint.compose`) minimises what filling and draining a pipeline once takes,
closing seconds spread over the micro-batches. The step differs a little from that: gradient sums of later stages run
beside the draining of earlier ones, and how a stage is best run depends on which stage is the slowest. So what was composed
is changed by one block or by neighbours' devices as long as the step gets shorter; of few compositions all are timed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardwright.search.joint._kernels import last_backwards
from shardwright.search.joint.found import JointPlan, JointStage

if TYPE_CHECKING:
    from shardwright.search.joint.space import Row, Space

MOST_CHANGES = 20_000
"""So many stages, in all small changes of a composition, are timed at most."""
FEW = 2_000
"""Up to so many compositions all of them are timed."""


class Run(NamedTuple):
    """A stage before its strategy is chosen: from cut to cut, on so many units of devices."""

    start: int
    end: int
    units: int


class Choice(NamedTuple):
    """A stage with its strategy: seconds of a micro-batch, seconds after the last one, blocks that recompute."""

    row: Row
    seconds: float
    closing: float
    again: int


class Timed:
    """Compositions of some rows timed as 1F1B; stages are chosen once."""

    def __init__(self, space: Space, rows: Sequence[Row], schedule: str = "1f1b") -> None:
        self.space, self.rows, self.schedule = space, rows, schedule
        self._chosen: dict[tuple[object, ...], tuple[Choice, ...]] = {}

    def kind(self, run: Run) -> np.ndarray:
        """Blocks of a stage, and whether it is the first and the last, as columns."""
        count = self.space.count_between(np.array([run.start]), np.array([run.end]))
        return np.stack([count, [run.start == 0], [run.end == self.space.cuts - 1]])

    def choices(self, run: Run, after: int, held: int) -> tuple[Choice, ...]:
        """How a stage may be run: the fastest a micro-batch, and those that close faster, none worse in both."""
        space = self.space
        kind = self.kind(run)
        far = (run.start > 0 and space.far[after + run.units], run.end < space.cuts - 1 and space.far[after])
        key = (kind.tobytes(), run.units, *far, held, *self._where(after, run.units))
        if key not in self._chosen:
            found = []
            for row in self.rows:
                if row.units == run.units and row.low <= after and after + run.units <= row.high:
                    seconds, again = space.seconds(row, kind, np.array([held]))
                    if np.isfinite(seconds[0, 0]):
                        border = 2 * (row.far - row.near) * sum(far)
                        closing = float(row.price.closing.of(*kind)[0])
                        found.append(Choice(row, float(seconds[0, 0] + border), closing, int(again[0, 0])))
            found.sort(key=lambda choice: (choice.seconds, choice.closing))
            kept: list[Choice] = []
            for choice in found:
                if not kept or choice.closing < kept[-1].closing:
                    kept.append(choice)
            self._chosen[key] = tuple(kept)
        return self._chosen[key]

    def _where(self, after: int, units: int) -> tuple[bool, ...]:
        """In which parts of a line of unlike devices a stage stands."""
        parts = sorted({(row.low, row.high) for row in self.rows})
        return tuple(low <= after and after + units <= high for low, high in parts)

    def stages(self, runs: Sequence[Run]) -> list[tuple[Choice, ...]] | None:
        """The ways to run every stage of a composition; nothing where one has none."""
        found, after = [], 0
        for place, run in enumerate(reversed(runs)):
            if after % run.units or after + run.units > self.space.devices:
                return None
            held = self.space.microbatches if self.schedule == "gpipe" and len(runs) > 1 else place + 1
            choices = self.choices(run, after, held)
            if not choices:
                return None
            found.append(choices)
            after += run.units
        return found[::-1]

    def step(self, chosen: Sequence[Choice]) -> float:
        """Seconds of a step."""
        microbatches, stages = self.space.microbatches, len(chosen)
        warm = np.arange(stages, 0, -1) if self.schedule == "1f1b" else np.full(stages, microbatches)
        ends = last_backwards(np.array([c.seconds for c in chosen]), microbatches, np.minimum(warm, microbatches))
        return float((ends + [c.closing for c in chosen]).max())

    def timed(self, runs: Sequence[Run]) -> tuple[float, list[Choice]] | None:
        """The step of a composition, every stage run as is best for it alone or, one by one, for the step."""
        ways = self.stages(runs)
        if ways is None:
            return None
        m = self.space.microbatches
        chosen = [min(choices, key=lambda c: c.seconds + c.closing / m) for choices in ways]
        best = self.step(chosen)
        for place, choices in enumerate(ways):
            for other in choices if len(choices) > 1 else ():
                changed = [*chosen[:place], other, *chosen[place + 1 :]]
                if other is not chosen[place] and (seconds := self.step(changed)) < best:
                    best, chosen = seconds, changed
        return best, chosen

    def fastest_of_few(self) -> list[Run] | None:
        """The composition with the shortest step, where there are so few that all can be timed."""
        last, powers = self.space.cuts - 1, [1 << k for k in range(self.space.devices.bit_length())]
        most = min(self.space.most, last)
        if sum(math.comb(last - 1, n - 1) * len(powers) ** n for n in range(1, most + 1)) > FEW:
            return None
        best: tuple[float, list[Run]] | None = None
        for stages in range(1, most + 1):
            inner = itertools.combinations(range(1, last), stages - 1)
            for between, units in itertools.product(inner, itertools.product(powers, repeat=stages)):
                ends = itertools.pairwise([0, *between, last])
                runs = [Run(*two, own) for two, own in zip(ends, units, strict=True)]
                found = self.timed(runs)
                if found is not None and (best is None or found[0] < best[0]):
                    best = found[0], runs
        return None if best is None else best[1]

    def improved(self, runs: Sequence[Run]) -> JointPlan | None:
        """What small changes of a composition come to, as long as they make the step shorter."""
        best, left, here = self.timed(runs), MOST_CHANGES // len(runs), list(runs)
        while best is not None and left > 0:
            for other in _changes(here):
                left -= 1
                found = self.timed(other)
                if found is not None and found[0] < best[0] * (1 - 1e-12):
                    best, here = found, other
                    break
                if left <= 0:
                    break
            else:
                break
        return self.plan(here)

    def plan(self, runs: Sequence[Run]) -> JointPlan | None:
        """A composition as a plan; nothing where it does not fit."""
        found = self.timed(runs)
        if found is None:
            return None
        space, (seconds, chosen), stages, first = self.space, found, [], 0
        unhidden = self.step(
            [
                choice._replace(seconds=choice.seconds - choice.row.price.traffic.of(*self.kind(run))[0], closing=0.0)
                for run, choice in zip(runs, chosen, strict=True)
            ]
        )
        for place, (run, choice) in enumerate(zip(runs, chosen, strict=True)):
            held = space.microbatches if self.schedule == "gpipe" and len(runs) > 1 else len(runs) - place
            price, kind = choice.row.price, self.kind(run)
            flying = price.held.of(*kind) - choice.again * price.recompute_saves
            memory = price.resting.of(*kind) + flying * held + (price.held.block if choice.again else 0.0)
            begins = min(run.start * space.grain, space.blocks)
            stages.append(
                JointStage(
                    first_block=begins,
                    last_block=begins + int(kind[0, 0]),
                    first_device=first * space.unit,
                    mesh=price.mesh,
                    strategy_name=price.name,
                    strategy=price.strategy,
                    recomputed_blocks=choice.again,
                    holds=held,
                    seconds=choice.seconds,
                    closing_seconds=choice.closing,
                    memory_bytes=float(memory[0]),
                )
            )
            first += run.units
        sent = 4 * space.microbatches * space.pricer.boundary_bytes / min(stage.devices for stage in stages)
        return JointPlan(
            tuple(stages), space.size, space.microbatches, self.schedule, seconds, 0.0, 0.0,
            f"pipelines with micro-batches of {space.size} or another size that was tried: contiguous runs of blocks on "
            "sub-meshes of powers of two, splits as priced per mesh, seconds summed, any schedule of whole passes",
            sent * (len(stages) > 1), unhidden,
        )  # fmt: skip


def _changes(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Small changes of a composition: blocks from one stage to another, devices of neighbours swapped, neighbours made one,
    a stage on more or fewer devices or cut in two."""
    stages = len(runs)
    pairs = sorted(itertools.permutations(range(stages), 2), key=lambda pair: abs(pair[0] - pair[1]))
    for giver, taker in pairs:
        if runs[giver].end - runs[giver].start > 1:
            low, high, by = min(giver, taker), max(giver, taker), 1 if giver > taker else -1
            moved = list(runs)
            for k in range(low, high):  # every border between them
                moved[k] = moved[k]._replace(end=moved[k].end + by)
                moved[k + 1] = moved[k + 1]._replace(start=moved[k + 1].start + by)
            yield moved
    for k, (one, other) in enumerate(itertools.pairwise(runs)):
        if one.units != other.units:
            yield [*runs[:k], one._replace(units=other.units), other._replace(units=one.units), *runs[k + 2 :]]
        for units in {one.units, other.units, 2 * max(one.units, other.units)}:
            yield [*runs[:k], Run(one.start, other.end, units), *runs[k + 2 :]]
    for k, run in enumerate(runs):
        for units in (2 * run.units, run.units // 2):
            if units:
                yield [*runs[:k], run._replace(units=units), *runs[k + 1 :]]
        for units, cut in itertools.product((run.units, run.units // 2), range(run.start + 1, run.end)):
            if units:
                yield [*runs[:k], Run(run.start, cut, units), Run(cut, run.end, units), *runs[k + 1 :]]
