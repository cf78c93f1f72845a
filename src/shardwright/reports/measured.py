"""Predicted beside measured: the recorded step of every rank, laid over the simulated step of its group.

A rank's passes stand in its trace under their names, and inside each the instructions that ran. A pass works from its first
instruction to its last; what lies before, between and after passes is waiting, for other stages or for Python. A trace
without passes is one forward and one backward pass, of a plan that has no others. Ranks are put on one clock by the time of
day that their traces carry, which is as good as the clocks of their hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.costs.pricing import FREE
from shardwright.errors import ShardwrightError
from shardwright.program.instructions import REDUCE, UPDATE
from shardwright.program.naming import closing_name
from shardwright.reports.html import breakable, escape, table
from shardwright.reports.matching import Match, MatchedRow, by_instruction, by_operator, carried, rows_of, worst_first
from shardwright.reports.steps import Event, PlanStep, several_passes
from shardwright.reports.traces import Raw, Trace, TraceSpan
from shardwright.schedules import BACKWARD, FORWARD, Action
from shardwright.units import seconds_text

MOST_SPANS = 50_000
"""Events of all groups together up to which the page carries them one by one; beyond, it shows passes alone."""


@dataclass(frozen=True)
class RankMeasured:
    """One rank's step on the clock of all: its passes in order, what followed them, and everything inside."""

    rank: int
    group: int
    passes: tuple[tuple[Action, float, float], ...]
    closing: tuple[tuple[float, float], ...]
    spans: tuple[TraceSpan, ...]
    rows: tuple[MatchedRow, ...]
    matched: int
    events: int
    computed: float
    """Seconds of the computation that found a partner."""

    @property
    def busy(self) -> float:
        """Seconds inside passes and what follows them."""
        return sum(end - start for _, start, end in self.passes) + sum(end - start for start, end in self.closing)

    @property
    def end(self) -> float:
        return max(end for end in (*(end for *_, end in self.passes), *(end for _, end in self.closing)))


@dataclass(frozen=True)
class Measured:
    """A recorded step beside the simulated one."""

    ranks: tuple[RankMeasured, ...]

    @property
    def seconds(self) -> float:
        """From the first pass of any rank to the end of everything."""
        return max(rank.end for rank in self.ranks)

    @property
    def rows(self) -> tuple[MatchedRow, ...]:
        return worst_first(row for rank in self.ranks for row in rank.rows)


def compare(step: PlanStep, traces: Sequence[Trace]) -> Measured:
    """Match the traces of some ranks, or all, with the simulated step of their groups.

    >>> compare(step, read_traces("trace.json")).rows[0]                                         # doctest: +SKIP

    Raises
    ------
    ShardwrightError
        When a trace holds no passes where there are several, or those of another plan.
    """
    for trace in traces:
        _check(step, trace)
    ranks = [_rank(step, trace) for trace in traces]
    base = min(trace.began for trace in traces)  # seconds since 1970 would leave microseconds alone
    clocks = [trace.began - base for trace in traces]
    first = min(clock + rank.passes[0][1] for clock, rank in zip(clocks, ranks, strict=True))
    return Measured(tuple(_moved(rank, clock, first) for clock, rank in zip(clocks, ranks, strict=True)))


def _check(step: PlanStep, trace: Trace) -> None:
    if not trace.passes and several_passes(step.plan):
        raise ShardwrightError(
            f"The trace of rank {trace.rank} holds no passes.",
            "Record it with `shardwright run plan.json --profile trace.json -- train.py`, five steps or more.",
        )
    mine, orders = _group(step, trace.rank), step.plan.schedule.orders
    if mine < 0 or (trace.passes and sorted(action for action, _ in trace.passes) != sorted(orders[mine])):
        raise ShardwrightError(
            f"The passes that rank {trace.rank} recorded are not those of the plan.",
            "Record a training step of this plan: shardwright run plan.json --profile trace.json -- train.py",
        )


def _group(step: PlanStep, rank: int) -> int:
    """The group that a rank belongs to; -1: none."""
    return next((group for group in step.groups if rank in step.ranks(group)), -1)


@dataclass
class _Collected:
    """What one rank's trace has given so far."""

    trace: Trace
    computed: list[Match] = field(default_factory=list)
    sent: list[Event] = field(default_factory=list)
    expected: int = 0

    def expect(self, events: Sequence[Event]) -> None:
        self.expected += sum(event.kind not in FREE for event in events)
        self.sent += [event for event in events if event.collective]

    def take(self, events: Sequence[Event], done: Raw) -> tuple[float, float]:
        """Match what ran inside an event of the trace; when the first of it began and the last ended."""
        inside = self.trace.inside(done)
        self.computed += by_instruction(events, inside, self.trace)
        self.expect(events)
        ran = [(e["start"], e["start"] + e["dur"]) for _, e in inside] or [(done["start"], done["start"] + done["dur"])]
        return min(start for start, _ in ran), max(end for _, end in ran)

    def take_all(self, events: Sequence[Event], step: PlanStep) -> list[tuple[Action, float, float]]:
        """Match everything in a trace without passes: a forward pass and what follows it."""
        self.computed += by_instruction(events, self.trace.instructions, self.trace) or by_operator(
            events, step.graph, self.trace
        )
        self.expect(events)
        passes = []
        for kind, phases in ((FORWARD, {"forward"}), (BACKWARD, {"backward", "recompute"})):
            spans = [span for _, span in self.computed if span.phase in phases]
            if spans:
                ends = min(span.start for span in spans), max(span.end for span in spans)
                passes.append((Action(0, kind, 0), *ends))
        if not passes:
            raise ShardwrightError(
                f"Nothing in the trace of rank {self.trace.rank} is of this plan.",
                "Record a step of this plan: shardwright run plan.json --profile trace.json -- train.py",
            )
        return passes

    def take_updates(self, events: Sequence[Event]) -> list[tuple[float, float]]:
        """The optimizer's steps: one of them may update several stages."""
        self.expected += len(events)
        found = []
        for done in self.trace.updates:
            self.computed.append(([*events], self.trace.device.span("update", "optimizer", done)))
            found.append((done["start"], done["start"] + done["dur"]))
            events = ()
        return found


def _rank(step: PlanStep, trace: Trace) -> RankMeasured:
    """One rank, on the clock of its own trace."""
    group, timeline, collected = _group(step, trace.rank), step.timeline, _Collected(trace)
    stages, sizes = step.stages(group), timeline.pipeline.micro.sizes
    last = {stage: timeline.stage(stage) for stage in stages}
    passes = []
    for action, done in trace.passes:
        mine = timeline.times[action.stage, sizes[action.microbatch]]
        passes.append((action, *collected.take([mine.events[n] for n in mine.passes[action.kind]], done)))
    if not passes:
        (mine,) = last.values()
        passes = collected.take_all(
            [event for n, event in enumerate(mine.events) if n not in mine.passes[UPDATE]], step
        )
    closing = [
        collected.take([mine.events[n] for n in mine.passes[REDUCE]], done)
        for stage, mine in last.items()
        for done in trace.named(closing_name(stage))
    ]
    closing += collected.take_updates([mine.events[n] for mine in last.values() for n in mine.passes[UPDATE]])
    sent = carried(step.steps[stages[0]], collected.sent, trace)
    matches = [*collected.computed, *sent]
    where = f"{trace.rank} (stage {', '.join(map(str, stages))})" if len(step.plan.stages) > 1 else str(trace.rank)
    return RankMeasured(
        trace.rank,
        group,
        tuple(passes),
        tuple(closing),
        tuple(sorted((span for _, span in matches), key=lambda span: span.start)),
        tuple(rows_of(step.graph, collected.computed, sent, where)),
        sum(len(events) for events, _ in matches),
        collected.expected,
        sum(span.end - span.start for _, span in collected.computed),
    )


def _moved(rank: RankMeasured, clock: float, first: float) -> RankMeasured:
    """A rank on the clock of all: its own began at ``clock``, the step at ``first``."""

    def at(second: float) -> float:
        return clock + second - first

    return replace(
        rank,
        passes=tuple((action, at(start), at(end)) for action, start, end in rank.passes),
        closing=tuple((at(start), at(end)) for start, end in rank.closing),
        spans=tuple(replace(span, start=at(span.start), end=at(span.end)) for span in rank.spans),
    )


def packed_spans(spans: Sequence[TraceSpan], title: str) -> dict[str, Any]:
    """Measured spans as the page's timeline draws them."""
    table_of = list(dict.fromkeys(word for span in spans for word in (span.phase, span.name)))
    place = {word: number for number, word in enumerate(table_of)}
    computes = ("forward", "backward", "recompute", "update")
    return {
        "title": title,
        "streams": ["compute", "communication"],
        "stream": [0 if span.phase in computes else 1 for span in spans],
        "phase": [place[span.phase] for span in spans],
        "name": [place[span.name] for span in spans],
        "start": [span.start for span in spans],
        "end": [span.end for span in spans],
        "words": table_of,
    }


def packed_measured(measured: Measured) -> dict[str, Any]:
    """What the page's timeline draws: the passes of every rank, and of one rank of every group what ran in them."""
    first = {rank.group: rank for rank in reversed(measured.ranks)}
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
            group: packed_spans(rank.spans, f"measured, rank {rank.rank}") for group, rank in first.items() if whole
        },
    }


def measured_html(step: PlanStep, measured: Measured) -> str:
    """Every rank's work and waiting, predicted and measured, and the differences by operator, worst first."""
    timeline = step.timeline
    rows = []
    for rank in sorted(measured.ranks, key=lambda rank: -abs(rank.busy - timeline.busy[rank.group])):
        predicted = timeline.busy[rank.group]
        rows.append(
            [
                str(rank.rank),
                ", ".join(map(str, step.stages(rank.group))),
                seconds_text(predicted),
                seconds_text(rank.busy),
                escape(("+" if rank.busy >= predicted else "−") + seconds_text(abs(rank.busy - predicted))),
                f"{100 * max(0.0, 1 - predicted / timeline.seconds):.0f} %",
                f"{100 * max(0.0, 1 - rank.busy / measured.seconds):.0f} %",
                f"{rank.matched} of {rank.events}",
                seconds_text(max(rank.busy - rank.computed, 0.0)),
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
        "beside it",
    ]
    missing = step.plan.devices - len(measured.ranks)
    said = (
        f"Measured {seconds_text(measured.seconds)}, predicted {seconds_text(timeline.seconds)}, on "
        f"{len(measured.ranks)} of {step.plan.devices} ranks. A pass works from its first instruction to its last; "
        "everything else is waiting, for other stages most of all. Matched are predicted events that have a partner in the "
        "trace; beside it lie Python, what the profiler adds, waiting inside passes, operators without a partner."
    )
    if missing:
        said += f" The traces of {missing} ranks are not beside the one that was named."
    return (
        f'<h3>Predicted beside measured</h3><p class="hint">{escape(said)}</p>'
        + table("Ranks, the worst predicted first", columns, rows, tight=True)
        + rows_html(measured.rows)
    )


MOST_ROWS = 20


def rows_html(rows: Sequence[MatchedRow]) -> str:
    columns = ["operator", "rank", "phase", "events", "predicted", "measured", "difference"]
    cells = [
        [
            breakable(f"{row.what} {row.module}".strip()),
            escape(row.where),
            escape(row.phase),
            str(row.count),
            seconds_text(row.predicted),
            seconds_text(row.measured),
            escape(("+" if row.difference >= 0 else "−") + seconds_text(abs(row.difference))),
        ]
        for row in rows[:MOST_ROWS]
    ]
    return table("Differences by operator, worst first", columns, cells)
