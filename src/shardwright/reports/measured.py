"""Predicted beside measured: a torch.profiler trace of one step of one rank, laid over the simulated step.

Forward operators are matched by their names in order, backward functions by the sequence number that autograd gives a
forward operator and its node, collectives by the order of their kinds, the update by its annotation. On an accelerator an
operator's seconds are those of the kernels it launched. What finds no partner is counted and said, not spread over others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from shardwright.costs.pricing import FREE
from shardwright.errors import ShardwrightError
from shardwright.files import read_json
from shardwright.graph import Graph
from shardwright.reports.cuts import short_target
from shardwright.reports.html import escape, table
from shardwright.reports.splitting import NUMBERED
from shardwright.reports.steps import RankStep
from shardwright.units import seconds_text

BACKWARD, UPDATE = "autograd::engine::evaluate_function", "Optimizer.step"
SAME = {"view": "reshape", "_unsafe_view": "reshape"}
"""Operators that a shard runs under another name."""

COLLECTIVES = {
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter", "reducescatter"),
    "all_reduce": ("allreduce", "all_reduce"),
    "all_to_all": ("alltoall", "all_to_all"),
}


@dataclass(frozen=True)
class Span:
    """Something that was measured: from ``start`` to ``end``, working for ``seconds`` of that."""

    phase: str
    name: str
    start: float
    end: float
    seconds: float


@dataclass(frozen=True)
class Row:
    """All events of one kind of operator: predicted and measured seconds of those that were matched."""

    phase: str
    what: str
    module: str
    count: int
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        return self.measured - self.predicted


@dataclass(frozen=True)
class Measured:
    """A recorded step beside a simulated one. ``rows`` by how far off they are, the worst first."""

    seconds: float
    rows: tuple[Row, ...]
    spans: tuple[Span, ...]
    matched: int
    events: int
    unmatched_seconds: float


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The complete events of a Chrome trace, in seconds from the first one."""
    document = read_json(path)
    found = document.get("traceEvents") if isinstance(document, dict) else document
    events = [e for e in found if isinstance(e, dict) and e.get("ph") == "X"] if isinstance(found, list) else []
    if not any(e.get("cat") == "cpu_op" for e in events):
        raise ShardwrightError(
            f"{str(path)!r} is not a trace of torch.profiler: it holds no operators.",
            "Record one with `shardwright run plan.json --profile trace.json -- train.py`.",
        )
    first = min(float(e["ts"]) for e in events if e.get("cat") == "cpu_op")
    return [{**e, "start": 1e-6 * (float(e["ts"]) - first), "dur": 1e-6 * float(e.get("dur", 0))} for e in events]


def compare_with(step: RankStep, graph: Graph, trace: Sequence[dict[str, Any]]) -> Measured:
    """Match a trace's events with a simulated step's.

    >>> compare_with(step, graph, read_trace("trace.json")).rows[0]
    """
    threads = Counter(e["tid"] for e in trace if e.get("cat") == "cpu_op")
    main = threads.most_common(1)[0][0]
    device = _Device(trace)
    roots = _outermost([e for e in trace if e["tid"] == main and e.get("cat") in ("cpu_op", "user_annotation")])
    forward = [e for e in roots if str(e["name"]).startswith("aten::")]
    spans: dict[tuple[str, str], list[Span]] = {}

    def note(phase: str, name: str, event: dict[str, Any]) -> None:
        spans.setdefault((phase, name), []).append(device.span(phase, name, event))

    targets = {op.name: _plain(short_target(op)) for op in graph.ops}
    predicted = [e.name for e in step.events if e.kind == "operator" and e.phase == "forward"]
    owners: dict[int, str] = {}
    numbered = _Numbered([e for e in trace if e["tid"] == main and e.get("cat") == "cpu_op"])
    ran = [_plain(e["name"]) for e in forward]
    for name, event in _aligned(predicted, [targets[n] for n in predicted], forward, ran):
        note("forward", name, event)
        owners.update({number: str(name) for number in numbered.inside(event)})
    for event in (e for e in trace if str(e["name"]).startswith(BACKWARD)):
        owner = owners.get(int(event.get("args", {}).get("Sequence number", -1)))
        if owner is not None:
            note("backward", owner, event)
    for event in (e for e in trace if str(e["name"]).startswith(UPDATE)):
        note("update", next((e.name for e in step.events if e.kind == "update"), ""), event)
    sent = [e for e in step.events if e.collective]
    performed = _collectives(trace, main)
    pairs = _aligned(sent, [e.collective for e in sent], performed, [kind for kind, _ in performed])
    traffic = [(planned, device.span(step.carries(planned), planned.name, event)) for planned, (_, event) in pairs]
    return _summary(step, graph, spans, traffic, roots)


def _summary(step: RankStep, graph: Graph, spans: Any, traffic: Any, roots: Sequence[dict[str, Any]]) -> Measured:
    sums: dict[tuple[str, str, str], list[float]] = {}

    def add(phase: str, what: str, module: str, planned: float, took: float) -> None:
        total = sums.setdefault((phase, what, NUMBERED.sub("*", module)), [0, 0.0, 0.0])
        total[0] += 1
        total[1] += planned
        total[2] += took

    ops = {op.name: op for op in graph.ops}
    matched = 0
    for event in step.events:
        counts = event.kind in ("operator", "weight", "update")
        found = spans.get((event.phase, event.name)) if counts else None
        if found:
            # Gradients of inputs and of weights are two instructions and one function of autograd's.
            parts = 2 if event.kind == "weight" else 1
            matched += parts
            what = short_target(ops[event.name]) if event.name in ops else event.name
            add(event.phase, what, event.module, parts * event.seconds, sum(span.seconds for span in found))
    for planned, span in traffic:
        matched += 1
        kind = planned.collective.replace("_", "-")
        add(step.carries(planned), kind, f"over {planned.stream}", planned.seconds, span.seconds)
    rows = [Row(phase, what, module, int(n), a, b) for (phase, what, module), (n, a, b) in sums.items()]
    rows.sort(key=lambda row: -abs(row.difference))
    everything = [span for found in spans.values() for span in found] + [span for _, span in traffic]
    everything.sort(key=lambda span: span.start)
    length = max((e["start"] + e["dur"] for e in roots), default=0.0)
    computing = sum(span.end - span.start for found in spans.values() for span in found)
    issued = sum(event.kind not in FREE for event in step.events)
    return Measured(length, tuple(rows), tuple(everything), matched, issued, max(length - computing, 0.0))


def packed_measured(measured: Measured) -> dict[str, Any]:
    """What the page's timeline draws."""
    spans, computes = measured.spans, ("forward", "backward", "update")
    table_of = list(dict.fromkeys(word for span in spans for word in (span.phase, span.name)))
    place = {word: number for number, word in enumerate(table_of)}
    return {
        "title": f"measured, rank 0: {seconds_text(measured.seconds)}",
        "streams": ["compute", "communication"],
        "stream": [0 if span.phase in computes else 1 for span in spans],
        "phase": [place[span.phase] for span in spans],
        "name": [place[span.name] for span in spans],
        "start": [span.start for span in spans],
        "end": [span.end for span in spans],
        "words": table_of,
    }


def measured_html(measured: Measured, predicted: float, most: int = 20) -> str:
    """The differences by operator as a table, worst first."""
    rows = [
        [
            escape(f"{row.what} {row.module}".strip()),
            escape(row.phase),
            str(row.count),
            seconds_text(row.predicted),
            seconds_text(row.measured),
            escape(("+" if row.difference >= 0 else "−") + seconds_text(abs(row.difference))),
        ]
        for row in measured.rows[:most]
    ]
    said = (
        f"Measured {seconds_text(measured.seconds)}, predicted {seconds_text(predicted)}. {measured.matched} of "
        f"{measured.events} predicted events have a partner in the trace; {seconds_text(measured.unmatched_seconds)} of the "
        "measured step lies between them: Python, what the profiler adds, waiting, operators without a partner."
    )
    columns = ["operator", "phase", "events", "predicted", "measured", "difference"]
    return f'<h3>Predicted beside measured</h3><p class="hint">{escape(said)}</p>' + table(
        "Differences by operator, worst first", columns, rows
    )


def _plain(name: str) -> str:
    name = name.removeprefix("aten::").rstrip("_")
    return SAME.get(name, name)


Pairs = list[tuple[Any, Any]]


def _aligned(left: Sequence[Any], left_keys: list[str], right: Sequence[Any], right_keys: list[str]) -> Pairs:
    """Partners by order: of names that occur equally often on both sides the first with the first and so on.

    Of the others, those that stand alike in both sequences.
    """
    mine, theirs = _places(left_keys), _places(right_keys)
    sure = {key for key, found in mine.items() if len(found) == len(theirs.get(key, ()))}
    pairs = [pair for key in sure for pair in zip(mine[key], theirs[key], strict=True)]
    blocks = SequenceMatcher(None, left_keys, right_keys, autojunk=False).get_matching_blocks()
    doubtful = [(a + i, b + i) for a, b, size in blocks for i in range(size) if left_keys[a + i] not in sure]
    return [(left[a], right[b]) for a, b in sorted(pairs + doubtful)]


def _places(keys: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


def _outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events of one thread that no other one contains, in order."""
    found: list[dict[str, Any]] = []
    end = float("-inf")
    for event in sorted(events, key=lambda e: (e["start"], -e["dur"])):
        if event["start"] >= end:
            found.append(event)
            end = event["start"] + event["dur"]
    return found


class _Numbered:
    """The sequence numbers that autograd gave inside an interval of a thread."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        events = sorted(events, key=lambda e: e["start"])
        self.starts = [e["start"] for e in events]
        self.given = [int(e.get("args", {}).get("Sequence number", -1)) for e in events]

    def inside(self, event: dict[str, Any]) -> list[int]:
        low = bisect_left(self.starts, event["start"])
        high = bisect_right(self.starts, event["start"] + event["dur"])
        return [number for number in self.given[low:high] if number >= 0]


class _Device:
    """Kernels by the operator that launched them, where there is an accelerator."""

    def __init__(self, trace: Sequence[dict[str, Any]]) -> None:
        self.kernels = {
            e["args"]["correlation"]: e
            for e in trace
            if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "correlation" in e.get("args", {})
        }
        launches = [e for e in trace if e.get("cat") == "cuda_runtime" and "correlation" in e.get("args", {})]
        self.launches: dict[Any, list[dict[str, Any]]] = {}
        for launch in sorted(launches, key=lambda e: e["start"]):
            self.launches.setdefault(launch["tid"], []).append(launch)

    def span(self, phase: str, name: str, event: dict[str, Any]) -> Span:
        """An event in time: its kernels where it launched any, itself on a processor."""
        start, end = event["start"], event["start"] + event["dur"]
        if not self.kernels or event.get("cat") == "kernel":
            return Span(phase, name, start, end, event["dur"])
        mine = self.launches.get(event["tid"], [])
        starts = [launch["start"] for launch in mine]
        inside = mine[bisect_left(starts, start) : bisect_right(starts, end)]
        ran = [self.kernels[e["args"]["correlation"]] for e in inside if e["args"]["correlation"] in self.kernels]
        if not ran:
            return Span(phase, name, start, end, 0.0)
        ends = max(k["start"] + k["dur"] for k in ran)
        return Span(phase, name, min(k["start"] for k in ran), ends, sum(k["dur"] for k in ran))


def _collectives(trace: Sequence[dict[str, Any]], main: Any) -> list[tuple[str, dict[str, Any]]]:
    """Collectives in the order they were issued, with the event that says how long each took.

    Gloo performs a reduce-scatter as an all-reduce and works in threads of its own: which kind it was is said by the call,
    how long it took by the worker's annotation.
    """
    kernels = sorted((e for e in trace if e.get("cat") == "kernel" and "nccl" in str(e["name"]).lower()), key=_start)
    if kernels:
        return [(kind, e) for e in kernels if (kind := _kind(str(e["name"])))]
    calls = sorted((e for e in trace if str(e["name"]).startswith("c10d::") and _kind(str(e["name"]))), key=_start)
    work = sorted((e for e in trace if str(e["name"]).startswith("gloo:")), key=_start)
    if len(calls) != len(work):
        return []
    return [(_kind(str(call["name"])), done) for call, done in zip(calls, work, strict=True)]


def _kind(name: str) -> str:
    plain = name.lower()
    return next((kind for kind, words in COLLECTIVES.items() if any(word in plain for word in words)), "")


def _start(event: dict[str, Any]) -> float:
    return float(event["start"])
