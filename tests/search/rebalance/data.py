"""Two production jobs with stragglers, as measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.search.rebalance import Job

DATA = Path(__file__).resolve().parents[2] / "data" / "stragglers"


def trace(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def job(name: str) -> Job:
    """The job from the medians of its trace."""
    measured = trace(name)
    return Job(
        np.array(measured["forward_seconds_median"]),
        np.array(measured["backward_seconds_median"]),
        measured["dp"] * measured["microbatches_per_replica"],
        measured["hop_seconds_median"],
        sum(measured["fixed_seconds"].values()),
    )
