"""Measured jobs as files: three production jobs with stragglers were published so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from bench.published.reading import between
from bench.published.rebalance.job import Job
from bench.published.rebalance.sequences import Sequences
from shardwright.errors import ProblemError
from shardwright.files import read_json
from shardwright.records import read_record

MOST_MICROBATCHES = 20_000
"""Of all replicas: they are dealt out one by one."""
Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class _Trace:
    """Medians [replica][stage]; where sequences differ also seconds [step][replica][stage][micro-batch]."""

    others_allowed: ClassVar[bool] = True
    dp: int
    microbatches_per_replica: int
    hop_seconds_median: float
    fixed_seconds: dict[str, float]
    forward_seconds_median: Table
    backward_seconds_median: Table
    forward_seconds: tuple[tuple[Table, ...], ...] | None = None
    backward_seconds: tuple[tuple[Table, ...], ...] | None = None


def read_job(path: str | Path) -> Job | Sequences:
    """A job as measured: by the medians of its workers, or by its sequences where those are what differs.

    Medians of workers say nothing where micro-batches differ: a worker that had the longer ones is not slow.
    """
    trace = read_record(
        _Trace, read_json(path, ProblemError), where=f"{path} is no measured job", error=ProblemError,
        remedy="Write it as tests/data/stragglers/AR.json is.",
    )  # fmt: skip
    between(trace.dp, 1, 100_000, "dp")
    between(trace.microbatches_per_replica, 1, 100_000, "microbatches_per_replica")
    between(trace.hop_seconds_median, 0, 1e9, "hop_seconds_median")
    between(trace.dp * trace.microbatches_per_replica, 1, MOST_MICROBATCHES, "dp times microbatches_per_replica")
    fixed = sum(trace.fixed_seconds.values())
    between(fixed, 0, 1e9, "the sum of fixed_seconds")
    if trace.forward_seconds is not None and trace.backward_seconds is not None:
        tables = (_table("forward_seconds", trace.forward_seconds), _table("backward_seconds", trace.backward_seconds))
        measured = Sequences(*tables, trace.hop_seconds_median, fixed)
        if measured.uneven:
            return measured
    medians = (
        _table("forward_seconds_median", trace.forward_seconds_median),
        _table("backward_seconds_median", trace.backward_seconds_median),
    )
    return Job(*medians, trace.dp * trace.microbatches_per_replica, trace.hop_seconds_median, fixed)


def _table(name: str, rows: object) -> np.ndarray:
    try:
        return np.array(rows, dtype=float)
    except ValueError:
        raise ProblemError(f"the rows of {name} have unlike lengths.", "Measure every worker alike.") from None
