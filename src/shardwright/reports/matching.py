"""Partners: which events of a recorded step are which of a simulated one.

What the runtime ran is matched by the names of its instructions. In traces that hold no such names (of a module that is not
parallelized) forward operators are matched by theirs, in order, and backward functions by the sequence number that autograd
gives a forward operator and its node. Collectives are matched by the order of their kinds, the update by its annotation.
What finds no partner is counted and said, not spread over others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from shardwright.costs.pricing import FREE
from shardwright.graph import Graph
from shardwright.operators.record import RESHAPE, record
from shardwright.program.naming import meaning
from shardwright.reports.splitting import NUMBERED
from shardwright.reports.steps import Event, RankStep
from shardwright.reports.traces import Raw, Trace, TraceSpan

BACKWARD = "autograd::engine::evaluate_function"

Match = tuple[list[Event], TraceSpan]
"""Predicted events, and the one thing measured that they are."""


@dataclass(frozen=True)
class MatchedRow:
    """All events of one kind of operator: predicted and measured seconds of those that were matched. ``where``: the rank
    that ran them, and its stages."""

    phase: str
    what: str
    module: str
    count: int
    predicted: float
    measured: float
    where: str

    @property
    def difference(self) -> float:
        return self.measured - self.predicted


def by_instruction(
    events: Iterable[Event], performed: Iterable[tuple[tuple[str, ...], Raw]], trace: Trace
) -> list[Match]:
    """What computes, by the names of instructions: of those that are called alike the first is the first."""
    waiting: dict[str, list[Event]] = {}
    for event in events:
        if not event.collective and event.kind not in FREE:
            waiting.setdefault(meaning(event.instruction), []).append(event)
    for found in waiting.values():
        found.reverse()
    matches = []
    for said, done in performed:
        mine = [waiting[one].pop() for one in said if waiting.get(one)]
        if mine:
            matches.append((mine, trace.device.span(mine[0].phase, mine[0].name, done)))
    return matches


def carried(step: RankStep, sent: Sequence[Event], trace: Trace) -> list[Match]:
    """Collectives, by the order of their kinds."""
    performed = trace.collectives
    pairs = _aligned(sent, [event.collective for event in sent], performed, [kind for kind, _ in performed])
    return [([event], trace.device.span(step.carries(event), event.name, done)) for event, (_, done) in pairs]


def by_operator(events: Sequence[Event], graph: Graph, trace: Trace) -> list[Match]:
    """What computes, by PyTorch's names."""
    targets = {op.name: _plain(op.short) for op in graph.ops}
    forward = [e for e in events if e.kind == "operator" and e.phase == "forward"]
    # Gradients of inputs and of weights are two instructions and one function of autograd's.
    back: dict[str, list[Event]] = {}
    for event in events:
        if event.phase == "backward" and event.kind in ("operator", "input", "weight"):
            back.setdefault(event.name, []).append(event)
    ran = [e for e in trace.roots if e["name"].startswith("aten::")]
    numbered = _Numbered([e for e in trace.events if e["tid"] == trace.main and e.get("cat") == "cpu_op"])
    owners: dict[int, str] = {}
    matches: list[Match] = []
    for event, done in _aligned(forward, [targets[e.name] for e in forward], ran, [_plain(e["name"]) for e in ran]):
        matches.append(([event], trace.device.span("forward", event.name, done)))
        owners.update(dict.fromkeys(numbered.inside(done), event.name))
    for done in (e for e in trace.events if e["name"].startswith(BACKWARD)):
        owner = owners.get(_sequence_number(done), "")
        if owner in back:
            matches.append((back.pop(owner), trace.device.span("backward", owner, done)))
        elif owner:
            matches.append(([], trace.device.span("backward", owner, done)))
    return matches


def rows_of(graph: Graph, computed: Sequence[Match], traffic: Sequence[Match], where: str) -> list[MatchedRow]:
    """Matches of one kind together."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    ops = {op.name: op for op in graph.ops}

    def add(phase: str, what: str, module: str, count: int, predicted: float, took: float) -> None:
        total = sums.setdefault((phase, what, NUMBERED.sub("*", module)), [0, 0.0, 0.0])
        total[0] += count
        total[1] += predicted
        total[2] += took

    modules: dict[tuple[str, str], tuple[str, str]] = {}
    for events, span in computed:
        key = (span.phase, span.name)
        if events:
            target = ops[span.name].short if span.name in ops else span.name
            modules[key] = (
                (f"{target} and {len(events) - 1} more, compiled" if _fused(events) else target),
                events[0].module,
            )
        what, module = modules.get(key, (span.name, ""))
        add(span.phase, what, module, int(bool(events)), sum(event.seconds for event in events), span.seconds)
    for (event, *_), span in traffic:
        add(span.phase, event.collective.replace("_", "-"), f"over {event.stream}", 1, event.seconds, span.seconds)
    return [MatchedRow(phase, what, module, int(n), a, b, where) for (phase, what, module), (n, a, b) in sums.items()]


def _fused(events: Sequence[Event]) -> bool:
    return len({event.name for event in events}) > 1


def worst_first(rows: Iterable[MatchedRow]) -> tuple[MatchedRow, ...]:
    return tuple(sorted(rows, key=lambda row: -abs(row.difference)))


def _plain(name: str) -> str:
    """Without what says where it writes; what only reshapes is one operator on a shard."""
    name = name.removeprefix("aten::").rstrip("_")
    return RESHAPE.split(".")[1] if record(f"aten.{name}.default").reshapes else name


Pairs = list[tuple[Any, Any]]


def _aligned(left: Sequence[Any], left_keys: list[str], right: Sequence[Any], right_keys: list[str]) -> Pairs:
    """Partners by order: of names that occur equally often on both sides the first with the first and so on.

    Of the others, those that stand alike in both sequences.
    """
    mine, theirs = _places(left_keys), _places(right_keys)
    sure = {key for key, found in mine.items() if len(found) == len(theirs.get(key, ()))}
    pairs = [pair for key in sure for pair in zip(mine[key], theirs[key], strict=True)]
    if len(sure) < len(mine):
        blocks = SequenceMatcher(None, left_keys, right_keys, autojunk=False).get_matching_blocks()
        pairs += [(a + i, b + i) for a, b, size in blocks for i in range(size) if left_keys[a + i] not in sure]
    return [(left[a], right[b]) for a, b in sorted(pairs)]


def _places(keys: list[str]) -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


class _Numbered:
    """The sequence numbers that autograd gave inside an interval of a thread."""

    def __init__(self, events: list[Raw]) -> None:
        events = sorted(events, key=lambda e: e["start"])
        self.starts = [e["start"] for e in events]
        self.given = [_sequence_number(e) for e in events]

    def inside(self, event: Raw) -> list[int]:
        low = bisect_left(self.starts, event["start"])
        high = bisect_right(self.starts, event["start"] + event["dur"])
        return [number for number in self.given[low:high] if number >= 0]


def _sequence_number(event: Raw) -> int:
    found = event.get("args", {}).get("Sequence number", -1)
    return found if isinstance(found, int) else -1
