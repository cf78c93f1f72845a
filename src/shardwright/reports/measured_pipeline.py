"""Predicted beside measured for a pipeline: the recorded step of every rank, laid over the simulated step of its stage.

A rank's passes stand in its trace under their names, and inside each the instructions that ran. A pass works from its first
instruction to its last; what lies before, between and after passes is waiting for other stages. Ranks are put on one clock
by the time of day that their traces carry, which is as good as the clocks of their hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.costs.pricing import FREE
from shardwright.errors import ShardwrightError
from shardwright.program.instructions import REDUCE, UPDATE
from shardwright.program.naming import closing_name
from shardwright.reports.html import escape, table
from shardwright.reports.measured import (
    Match,
    Row,
    by_instruction,
    carried,
    packed_spans,
    rows_html,
    rows_of,
    worst_first,
)
from shardwright.reports.pipelined import Piped
from shardwright.reports.steps import Event
from shardwright.reports.traces import Raw, Span, Trace
from shardwright.schedules import Action
from shardwright.units import seconds_text

MOST_SPANS = 50_000
"""Events of all stages together up to which the page carries them one by one; beyond, it shows passes alone."""


@dataclass(frozen=True)
class RankMeasured:
    """One rank's step on the clock of all: its passes in order, what followed them, and everything inside."""

    rank: int
    device: int
    passes: tuple[tuple[Action, float, float], ...]
    closing: tuple[tuple[float, float], ...]
    spans: tuple[Span, ...]
    rows: tuple[Row, ...]
    matched: int
    events: int

    @property
    def busy(self) -> float:
        """Seconds inside passes and what follows them."""
        return sum(end - start for _, start, end in self.passes) + sum(end - start for start, end in self.closing)

    @property
    def end(self) -> float:
        return max(end for end in (*(end for *_, end in self.passes), *(end for _, end in self.closing)))


@dataclass(frozen=True)
class PipelineMeasured:
    """A recorded step of a pipeline beside the simulated one."""

    ranks: tuple[RankMeasured, ...]

    @property
    def seconds(self) -> float:
        """From the first pass of any rank to the end of everything."""
        return max(rank.end for rank in self.ranks)

    @property
    def rows(self) -> tuple[Row, ...]:
        return worst_first(row for rank in self.ranks for row in rank.rows)


def compare_pipeline(piped: Piped, traces: Sequence[Trace]) -> PipelineMeasured:
    """Match the traces of some ranks, or all, with the simulated step of their stages.

    Raises
    ------
    ShardwrightError
        When a trace holds no passes, or those of another plan.
    """
    for trace in traces:
        _check(piped, trace)
    origin = min(trace.began + trace.passes[0][1]["start"] for trace in traces)
    return PipelineMeasured(tuple(_rank(piped, trace, trace.began - origin) for trace in traces))


def _check(piped: Piped, trace: Trace) -> None:
    if not trace.passes:
        raise ShardwrightError(
            f"The trace of rank {trace.rank} holds no passes of a pipeline.",
            "Record it with `shardwright run plan.json --profile trace.json -- train.py`, five steps or more.",
        )
    mine = _device(piped, trace.rank)
    orders = piped.timeline.timing.schedule.orders
    if mine < 0 or sorted(action for action, _ in trace.passes) != sorted(orders[mine]):
        raise ShardwrightError(
            f"The passes that rank {trace.rank} recorded are not those of the plan.",
            "Record a training step of this plan: shardwright run plan.json --profile trace.json -- train.py",
        )


def _device(piped: Piped, rank: int) -> int:
    """The device of the schedule that a rank belongs to; -1: none."""
    return next((device for device in set(piped.device_of) if rank in piped.ranks(device)), -1)


@dataclass
class _Collected:
    """What one rank's trace has given so far."""

    trace: Trace
    computed: list[Match] = field(default_factory=list)
    sent: list[Event] = field(default_factory=list)
    expected: int = 0

    def take(self, events: Sequence[Event], done: Raw) -> tuple[float, float]:
        """Match what ran inside an event of the trace; when the first of it began and the last ended."""
        inside = self.trace.inside(done)
        self.computed += by_instruction(events, inside, self.trace)
        self.expected += sum(event.kind not in FREE for event in events)
        self.sent += [event for event in events if event.collective]
        ran = [(e["start"], e["start"] + e["dur"]) for _, e in inside] or [(done["start"], done["start"] + done["dur"])]
        return min(start for start, _ in ran), max(end for _, end in ran)

    def take_updates(self, events: Sequence[Event]) -> list[tuple[float, float]]:
        """The optimizer's steps: one of them may update several stages."""
        self.expected += len(events)
        found = []
        for done in self.trace.updates:
            self.computed.append(([*events], self.trace.device.span("update", "optimizer", done)))
            found.append((done["start"], done["start"] + done["dur"]))
            events = ()
        return found


def _rank(piped: Piped, trace: Trace, shift: float) -> RankMeasured:
    device = _device(piped, trace.rank)
    stages, times, sizes = piped.stages(device), piped.timeline.times, piped.timeline.pipeline.micro.sizes
    collected = _Collected(trace)
    passes = []
    for action, done in trace.passes:
        mine = times[action.stage, sizes[action.microbatch]]
        start, end = collected.take([mine.events[n] for n in mine.passes[action.kind]], done)
        passes.append((action, start + shift, end + shift))
    last = {stage: times[stage, piped.largest] for stage in stages}
    closing = [
        collected.take([mine.events[n] for n in mine.passes[REDUCE]], done)
        for stage, mine in last.items()
        for done in trace.named(closing_name(stage))
    ]
    closing += collected.take_updates([mine.events[n] for mine in last.values() for n in mine.passes[UPDATE]])
    matches = [*collected.computed, *(sent := carried(piped.steps[stages[0]], collected.sent, trace))]
    spans = [replace(span, start=span.start + shift, end=span.end + shift) for _, span in matches]
    where = f"{trace.rank} (stage {', '.join(map(str, stages))})"
    return RankMeasured(
        trace.rank,
        device,
        tuple(passes),
        tuple((start + shift, end + shift) for start, end in closing),
        tuple(sorted(spans, key=lambda span: span.start)),
        tuple(rows_of(piped.graph, collected.computed, sent, where)),
        sum(len(events) for events, _ in matches),
        collected.expected,
    )


def packed(piped: Piped, measured: PipelineMeasured) -> dict[str, Any]:
    """What the page's timeline draws: the passes of every rank, and of one rank of every device what ran in them."""
    first = {rank.device: rank for rank in reversed(measured.ranks)}
    whole = sum(len(rank.spans) for rank in first.values()) <= MOST_SPANS
    return {
        "title": f"measured: {seconds_text(measured.seconds)}",
        "ranks": [
            {
                "rank": rank.rank,
                "passes": " ".join(str(action) for action, *_ in rank.passes),
                "times": [[start, end] for _, start, end in rank.passes],
                "closing": [[start, end] for start, end in rank.closing],
            }
            for rank in measured.ranks
        ],
        "spans": {
            device: packed_spans(rank.spans, f"measured, rank {rank.rank}") for device, rank in first.items() if whole
        },
    }


def pipeline_html(piped: Piped, measured: PipelineMeasured) -> str:
    """Every rank's work and waiting, predicted and measured, and the differences by operator, worst first."""
    timeline = piped.timeline
    rows = []
    for rank in sorted(measured.ranks, key=lambda rank: -abs(rank.busy - timeline.busy[rank.device])):
        predicted = timeline.busy[rank.device]
        rows.append(
            [
                str(rank.rank),
                ", ".join(map(str, piped.stages(rank.device))),
                seconds_text(predicted),
                seconds_text(rank.busy),
                escape(("+" if rank.busy >= predicted else "−") + seconds_text(abs(rank.busy - predicted))),
                f"{100 * max(0.0, 1 - predicted / timeline.seconds):.0f} %",
                f"{100 * max(0.0, 1 - rank.busy / measured.seconds):.0f} %",
                f"{rank.matched} of {rank.events}",
            ]
        )
    columns = [
        "rank",
        "stage",
        "working, predicted",
        "measured",
        "difference",
        "waiting, predicted",
        "measured",
        "matched",
    ]
    missing = piped.plan.devices - len(measured.ranks)
    said = (
        f"Measured {seconds_text(measured.seconds)}, predicted {seconds_text(timeline.seconds)}, on "
        f"{len(measured.ranks)} of {piped.plan.devices} ranks. A pass works from its first instruction to its last; "
        "everything else is waiting, for other stages most of all."
    )
    if missing:
        said += f" The traces of {missing} ranks are not beside the one that was named."
    return (
        f'<h3>Predicted beside measured</h3><p class="hint">{escape(said)}</p>'
        + table("Ranks, the worst predicted first", columns, rows, tight=True)
        + rows_html(measured.rows)
    )
