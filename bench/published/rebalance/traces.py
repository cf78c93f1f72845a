"""Measured jobs as files: three production jobs with stragglers were published so."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.published.rebalance.job import Job
from shardwright.errors import ProblemError
from shardwright.files import read_json

FIELDS = (
    "forward_seconds_median",
    "backward_seconds_median",
    "dp",
    "microbatches_per_replica",
    "hop_seconds_median",
    "fixed_seconds",
)


def read_job(path: str | Path) -> Job:
    """The job from the medians of its trace."""
    measured = read_json(path)
    missing = [key for key in FIELDS if key not in measured] if isinstance(measured, dict) else list(FIELDS)
    if missing:
        raise ProblemError(f"{path} has no {', '.join(missing)}.", "Write it as tests/data/stragglers/AR.json is.")
    return Job(
        np.array(measured["forward_seconds_median"]),
        np.array(measured["backward_seconds_median"]),
        measured["dp"] * measured["microbatches_per_replica"],
        measured["hop_seconds_median"],
        sum(measured["fixed_seconds"].values()),
    )
