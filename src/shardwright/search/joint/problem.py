"""The problem that joins cuts, devices and memory: a chain of stages, each from a list of priced candidates.

A model is worked through from cut 0 (nothing done) to the last cut (all done); the cuts of a chain are the places
between its layers, those of a general graph its ideals (Tarnawski et al. 2020). A *candidate stage* leads from one
cut to a later one and takes some devices. What it costs depends on how many micro-batches it must hold at once, which
is known only when the stages after it are: the more it holds, the more it must recompute or shard. So a candidate
carries a staircase: so many seconds while it holds at most so many micro-batches, more seconds for more, impossible
beyond the last step.

How many it holds: every candidate has a *share*, and a stage that is followed by stages whose shares add up to s
holds ``1 + ceil(s / share)`` micro-batches. With all shares 1 that is 1F1B's number of stages from here to the end;
with shares equal to the data-parallel degrees it is Piper's rule (Tarnawski et al. 2021).

Devices stand in a line, the first stage on the first ones. A candidate may ask that its devices lie within a part of
the line (``low``, ``high``: unlike devices) or start at a multiple of some number (``align``: do not straddle nodes),
and may cost more where it borders on a slow link (``far_in``, ``far_out`` seconds, paid where ``far`` says so).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import ProblemError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Candidates(NamedTuple):
    """Candidate stages, ordered by their first cut, the last cut's first; a row's steps are
    ``first_step[c]:first_step[c + 1]``.
    """

    start: Ints  # cut before the stage
    end: Ints  # cut after it
    devices: Ints
    share: Ints
    first_step: Ints
    holds: Ints  # per step: most micro-batches held at once, ascending
    seconds: Floats  # per step: of one micro-batch, forward and backward; ascending
    bound: Floats  # per step: no way to run the stage so is faster; equals ``seconds`` where those are exact
    closing: Floats  # per step: seconds after the last micro-batch (gradient sums, update)
    label: Ints  # per step: the caller's name for what was chosen
    align: Ints  # the devices after the stage are a multiple of this
    low: Ints  # devices after the stage: at least this many,
    high: Ints  # and with the stage's own at most this many
    far_in: Floats  # more seconds where the stage's input comes over a slow link
    far_out: Floats  # and where its output leaves over one


@dataclass(frozen=True)
class Objective:
    """Seconds of a step: ``slowest`` times the slowest stage plus ``total`` times the sum of all stages, per
    micro-batch.

    (1, 0) is the time per sample of a pipeline that never drains; (m - 1, 1) that of m micro-batches filled and
    drained.
    """

    slowest: float
    total: float


THROUGHPUT = Objective(1.0, 0.0)


def filled_and_drained(microbatches: int) -> Objective:
    """The objective of a pipeline that runs ``microbatches`` and then stops.

    >>> filled_and_drained(8)
    Objective(slowest=7.0, total=1.0)
    """
    return Objective(microbatches - 1.0, 1.0)


class Line(NamedTuple):
    """Cuts and devices in a line; ``far[k]``: the border with k devices after it is a slow link."""

    cuts: int
    devices: int
    far: NDArray[np.bool_]


@dataclass(frozen=True)
class PipelineProblem:
    """Lead from cut 0 to cut ``cuts - 1`` with candidate stages on at most ``devices`` devices."""

    name: str
    cuts: int
    devices: int
    candidates: Candidates
    objective: Objective
    far: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [devices + 1], by devices after
    describe: Callable[[int], dict[str, Any]] = field(default=lambda label: {"label": label}, compare=False)

    @property
    def line(self) -> Line:
        """The same for compiled code."""
        return Line(self.cuts, self.devices, self.far)

    def __post_init__(self) -> None:
        rows = self.candidates
        if len(rows.start) and (rows.start >= rows.end).any():
            c = int(np.argmax(rows.start >= rows.end))
            raise ProblemError(
                f"candidate stage {c} of {self.name} leads from cut {rows.start[c]} back to cut {rows.end[c]}.",
                "Number the cuts topologically.",
            )
        if len(rows.start) and (np.diff(rows.start) > 0).any():
            raise ProblemError(f"the candidates of {self.name} are not ordered.", "Order them by falling start.")
        if not len(self.far):
            object.__setattr__(self, "far", np.zeros(self.devices + 1, dtype=bool))


@dataclass(frozen=True)
class PlacedStage:
    """One stage of an answer."""

    start: int
    end: int
    devices: int
    first_device: int
    holds: int
    seconds: float
    bound: float
    closing: float
    label: int


def in_flight(share: int, shares_after: int) -> int:
    """Micro-batches that a stage holds at once.

    >>> in_flight(1, 3), in_flight(4, 6)
    (4, 3)
    """
    return 1 + -(-shares_after // share)


def step_seconds(stages: tuple[PlacedStage, ...], objective: Objective) -> float:
    """The objective's value of an answer."""
    times = [stage.seconds for stage in stages]
    return objective.slowest * max(times) + objective.total * sum(times)


@dataclass(frozen=True)
class StageTable:
    """Candidate stages of one kind (same devices, share and label): rows of one table, a column per micro-batch held.

    ``seconds[row, h]`` is for h + 1 micro-batches held, infinite where that does not fit; likewise ``bound``.
    """

    start: Ints
    end: Ints
    devices: int
    seconds: Floats
    bound: Floats
    label: int = 0
    share: int = 1
    align: int = 1
    low: int = 0
    high: int = 2**40
    closing: Floats | None = None  # per row
    far_in: Floats | None = None  # per row
    far_out: Floats | None = None


def pack(tables: Sequence[StageTable]) -> Candidates:
    """The tables as candidates, in order, with equal neighbouring columns joined into steps.

    >>> seconds = np.array([[1.0, 1.0, 3.0]])
    >>> packed = pack([StageTable(np.array([0]), np.array([1]), 2, seconds, seconds)])
    >>> packed.holds, packed.seconds
    (array([2, 3]), array([1., 3.]))
    """
    parts: list[tuple[Any, ...]] = [(_NO_INTS, _NO_INTS, _NO_INTS, _NO_INTS, np.zeros(0), np.zeros(0))]
    for place, table in enumerate(tables):
        # Who can hold more can hold less: neither seconds nor bounds fall as more is held.
        seconds = np.minimum.accumulate(table.seconds[:, ::-1], axis=1)[:, ::-1]
        bound = np.minimum.accumulate(table.bound[:, ::-1], axis=1)[:, ::-1]
        useful = np.isfinite(bound)
        last = useful.copy()
        last[:, :-1] &= ~(useful[:, 1:] & (seconds[:, 1:] == seconds[:, :-1]) & (bound[:, 1:] == bound[:, :-1]))
        at, column = np.nonzero(last)
        parts.append((table.start[at], np.full(len(at), place), at, column + 1, seconds[last], bound[last]))
    joined = [np.concatenate([part[k] for part in parts]) for k in range(6)]
    order = np.lexsort((joined[3], joined[2], joined[1], -joined[0]))
    first_cut, number, row, held = (joined[k][order].astype(np.int64) for k in range(4))
    new = np.ones(len(number), dtype=bool)
    new[1:] = (number[1:] != number[:-1]) | (row[1:] != row[:-1])
    first = np.nonzero(new)[0]

    def per_table(key: str, at: Ints) -> Ints:
        return np.array([getattr(table, key) for table in tables], dtype=np.int64)[number[at]] if tables else _NO_INTS

    def per_row(key: str, at: Ints) -> Floats:
        values = np.zeros(len(at))
        for k, table in enumerate(tables):
            column = getattr(table, key)
            if column is not None:
                mine = number[at] == k
                values[mine] = column[row[at][mine]]
        return values

    ends = np.zeros(len(first), dtype=np.int64)
    for k, table in enumerate(tables):
        mine = number[first] == k
        ends[mine] = table.end[row[first][mine]]
    every = np.arange(len(number))
    return Candidates(
        start=first_cut[first],
        end=ends,
        devices=per_table("devices", first),
        share=per_table("share", first),
        first_step=np.concatenate([first, [len(number)]]).astype(np.int64),
        holds=held,
        seconds=joined[4][order],
        bound=joined[5][order],
        closing=per_row("closing", every),
        label=per_table("label", every),
        align=per_table("align", first),
        low=per_table("low", first),
        high=per_table("high", first),
        far_in=per_row("far_in", first),
        far_out=per_row("far_out", first),
    )


_NO_INTS: Ints = np.zeros(0, dtype=np.int64)
