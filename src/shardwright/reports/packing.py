"""What a page carries, small: columns instead of rows, every string and float once, waits as distances, all of it deflated.

The blocks of a deep model repeat every number and every distance, so that a hundred and sixty layers take little more room
than ten. Floats are written as the shortest text that reads back as the same float, so nothing is rounded on the way.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from shardwright.reports.steps import COMPUTE, RankStep
from shardwright.simulator.engine import Processor
from shardwright.simulator.stages import processor_of


class Words:
    """A table in which every entry stands once, and columns that say for each item how far back in it the entry stands.

    0 means: an entry never seen before, the next of the table. Blocks that repeat each other under new names so give
    columns that repeat too. Columns must be read in the order in which they were written.

    >>> words = Words()
    >>> words.column(["a", "b", "a"]), words.table
    ([0, 0, 2], ['a', 'b'])
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, int] = {}

    def column(self, items: Iterable[Hashable]) -> list[int]:
        codes = []
        for item in items:
            known = len(self._places)
            codes.append(known - self._places.setdefault(item, known))
        return codes

    @property
    def table(self) -> list[Any]:
        return list(self._places)


def differences(values: Sequence[int]) -> list[int]:
    """Every value less the one before it.

    >>> differences([-1, -1, 3])
    [-1, 0, 4]
    """
    return [value - before for before, value in zip([0, *values], values, strict=False)]


def packed_step(step: RankStep) -> dict[str, Any]:
    """One kind of rank: its events and storages as columns over three tables."""
    words, numbers = Words(), Words()
    events, apart = step.stage.events, step.parts
    streams = {name: number for number, name in enumerate(step.streams)}
    memory = step.stage.memory
    processor = processor_of(step.stage.mesh)
    return {
        "streams": list(step.streams),
        "processor": processor and packed_processor(processor, step.streams),
        "stream": [streams[e.stream] for e in events],
        "kind": words.column(e.kind for e in events),
        "phase": words.column(e.phase for e in events),
        "name": words.column(e.name for e in events),
        "module": words.column(e.module for e in events),
        "collective": words.column(e.collective for e in events),
        "carries": words.column("" if e.stream == COMPUTE else step.carries(e) for e in events),
        "bytes": numbers.column(e.bytes for e in events),
        "latency": numbers.column(p.latency for p in apart),
        "wire": numbers.column(p.wire for p in apart),
        "local": numbers.column(p.local for p in apart),
        "host": numbers.column(e.host for e in events),
        "waits": [[place - earlier for earlier in e.after] for place, e in enumerate(events)],
        "storages": {
            "bytes": numbers.column(s.bytes for s in memory.storages),
            "kind": words.column(s.kind for s in memory.storages),
            "what": words.column(s.what for s in memory.storages),
            "module": words.column(s.module for s in memory.storages),
            "born": differences([s.born for s in memory.storages]),
            "lives": [s.dies - s.born for s in memory.storages],
        },
        "words": words.table,
        "numbers": numbers.table,
    }


def packed_processor(processor: Processor, names: Sequence[str]) -> dict[str, Any]:
    """A processor that communicates for itself; streams by their places."""
    streams = {name: number for number, name in enumerate(names)}
    return {
        "stream": streams[str(processor.stream)],
        "shares": {streams[str(k)]: v for k, v in processor.shares.items() if k in streams},
        "seconds": {streams[str(k)]: v for k, v in processor.seconds.items() if k in streams},
    }


def deflated(document: Any) -> str:
    """A JSON document as base64 of its gzip, the same bytes for the same document."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
