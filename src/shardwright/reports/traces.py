"""A recorded step of one rank: a trace of torch.profiler, read so that predictions can be laid beside it.

What the runtime ran stands in it under the names of instructions and passes (:mod:`shardwright.program.naming`); in traces
of other modules only PyTorch's own names do. On an accelerator the seconds of an event are those of the kernels that were
launched inside it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from shardwright.errors import ShardwrightError
from shardwright.files import read_json
from shardwright.program.naming import action_of, meanings
from shardwright.runtime.profiling import trace_path
from shardwright.schedules import Action

Raw = dict[str, Any]
"""An event of a trace, with its ``start`` and ``dur`` in seconds."""

UPDATE = "Optimizer.step"
COLLECTIVES = {
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter", "reducescatter"),
    "all_reduce": ("allreduce", "all_reduce"),
    "all_to_all": ("alltoall", "all_to_all"),
}


@dataclass(frozen=True)
class TraceSpan:
    """Something that was measured: from ``start`` to ``end``, working for ``seconds`` of that."""

    phase: str
    name: str
    start: float
    end: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Trace:
    """What one rank recorded: events in seconds from the first operator, which began at ``began`` by the host's clock."""

    events: tuple[Raw, ...]
    rank: int = 0
    began: float = 0.0

    @cached_property
    def main(self) -> Any:
        """The thread that runs the operators."""
        return Counter(e["tid"] for e in self.events if e.get("cat") == "cpu_op").most_common(1)[0][0]

    @cached_property
    def device(self) -> Kernels:
        return Kernels(self.events)

    @cached_property
    def roots(self) -> list[Raw]:
        """Events of the main thread that no other one contains, in order."""
        found: list[Raw] = []
        end = float("-inf")
        mine = (e for e in self.events if e["tid"] == self.main and e.get("cat") in ("cpu_op", "user_annotation"))
        for event in sorted(mine, key=lambda e: (e["start"], -e["dur"])):
            if event["start"] >= end:
                found.append(event)
                end = event["start"] + event["dur"]
        return found

    @cached_property
    def instructions(self) -> list[tuple[tuple[str, ...], Raw]]:
        """What the runtime ran, in order: the instructions that an event stands for, and the event."""
        found = ((meanings(e["name"]), e) for e in self._annotations)
        return [(said, event) for said, event in found if said]

    @cached_property
    def passes(self) -> list[tuple[Action, Raw]]:
        """The passes of a pipeline, in order."""
        found = ((action_of(e["name"]), e) for e in self._annotations)
        return [(action, event) for action, event in found if action is not None]

    def named(self, name: str) -> list[Raw]:
        return [e for e in self._annotations if e["name"] == name]

    @cached_property
    def updates(self) -> list[Raw]:
        return [e for e in self._annotations if e["name"].startswith(UPDATE)]

    @cached_property
    def _annotations(self) -> list[Raw]:
        return sorted((e for e in self.events if e.get("cat") == "user_annotation"), key=_start)

    def inside(self, event: Raw) -> list[tuple[tuple[str, ...], Raw]]:
        """The instructions that ran inside an event, on its thread."""
        low = bisect_left(self._begun, event["start"])
        high = bisect_right(self._begun, event["start"] + event["dur"])
        return [one for one in self.instructions[low:high] if one[1]["tid"] == event["tid"]]

    @cached_property
    def _begun(self) -> list[float]:
        return [event["start"] for _, event in self.instructions]

    @cached_property
    def collectives(self) -> list[tuple[str, Raw]]:
        """Collectives in the order they were issued, with the event that says how long each took.

        Gloo performs a reduce-scatter as an all-reduce and works in threads of its own: which kind it was is said by the
        call, how long it took by the worker's annotation.
        """
        kernels = sorted(
            (e for e in self.events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()), key=_start
        )
        if kernels:
            return [(kind, e) for e in kernels if (kind := _kind(e["name"]))]
        calls = sorted((e for e in self.events if e["name"].startswith("c10d::") and _kind(e["name"])), key=_start)
        work = sorted((e for e in self.events if e["name"].startswith("gloo:") and _kind(e["name"])), key=_start)
        if len(calls) != len(work):
            return []
        return [(_kind(call["name"]), done) for call, done in zip(calls, work, strict=True)]


def read_traces(path: str | Path) -> tuple[Trace, ...]:
    """The traces of a recorded step: the file that was named, and those of further ranks that lie beside it."""
    path = Path(path)
    pattern = re.compile(re.escape(path.stem) + r"\.rank(\d+)" + re.escape(path.suffix))
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    ranks = sorted(int(found.group(1)) for file in beside if (found := pattern.fullmatch(file.name)))
    return (read_trace(path), *(read_trace(trace_path(path, rank), rank) for rank in ranks if rank > 0))


def read_trace(path: str | Path, rank: int = 0) -> Trace:
    """The complete events of a Chrome trace."""
    document = read_json(path)
    found = document.get("traceEvents") if isinstance(document, dict) else document
    events = [e for e in found if _complete(e)] if isinstance(found, list) else []
    if not any(e.get("cat") == "cpu_op" for e in events):
        raise ShardwrightError(
            f"{str(path)!r} is not a trace of torch.profiler: it holds no operators.",
            "Record one with `shardwright run plan.json --profile trace.json -- train.py`.",
        )
    first = min(float(e["ts"]) for e in events if e.get("cat") == "cpu_op")
    base = document.get("baseTimeNanoseconds", 0) if isinstance(document, dict) else 0
    began = 1e-9 * base + 1e-6 * first if _number(base) else 1e-6 * first
    shifted = ({**e, "start": 1e-6 * (float(e["ts"]) - first), "dur": 1e-6 * float(e.get("dur", 0))} for e in events)
    return Trace(tuple(shifted), rank, began)


def _complete(event: Any) -> bool:
    """Whether an entry of a trace is an event that took time, with everything that is read of it later."""
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and isinstance(event.get("name"), str)
        and isinstance(event.get("tid"), int | str)
        and isinstance(event.get("cat", ""), str)
        and isinstance(event.get("args", {}), dict)
        and _number(event.get("ts"))
        and _number(event.get("dur", 0))
        and event.get("dur", 0) >= 0
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e18 and isfinite(value)


class Kernels:
    """Kernels by the event that launched them, where there is an accelerator."""

    def __init__(self, events: Sequence[Raw]) -> None:
        numbered = [e for e in events if isinstance(e.get("args", {}).get("correlation"), int)]
        kinds = ("kernel", "gpu_memcpy", "gpu_memset")
        self.kernels = {e["args"]["correlation"]: e for e in numbered if e.get("cat") in kinds}
        self.launches: dict[Any, list[Raw]] = {}
        for launch in sorted((e for e in numbered if e.get("cat") == "cuda_runtime"), key=_start):
            self.launches.setdefault(launch["tid"], []).append(launch)
        self._starts = {thread: [launch["start"] for launch in found] for thread, found in self.launches.items()}

    def span(self, phase: str, name: str, event: Raw) -> TraceSpan:
        """An event in time: its kernels where it launched any, itself on a processor."""
        start, end = event["start"], event["start"] + event["dur"]
        if not self.kernels or event.get("cat") == "kernel":
            return TraceSpan(phase, name, start, end, event["dur"])
        mine, starts = self.launches.get(event["tid"], []), self._starts.get(event["tid"], [])
        inside = mine[bisect_left(starts, start) : bisect_right(starts, end)]
        ran = [self.kernels[e["args"]["correlation"]] for e in inside if e["args"]["correlation"] in self.kernels]
        if not ran:
            return TraceSpan(phase, name, start, end, 0.0)
        ends = max(k["start"] + k["dur"] for k in ran)
        return TraceSpan(phase, name, min(k["start"] for k in ran), ends, sum(k["dur"] for k in ran))


def _kind(name: str) -> str:
    plain = name.lower()
    return next((kind for kind, words in COLLECTIVES.items() if any(word in plain for word in words)), "")


def _start(event: Raw) -> float:
    return float(event["start"])
