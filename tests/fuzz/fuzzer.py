"""Runs the targets: so many cases of each, every fault counted, the first case of every kind of fault kept."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as with_seed

from fuzz.guard import watched
from fuzz.targets import Target


@dataclass
class Result:
    """How many cases were run, in how many seconds, and what went wrong: a line for each kind of fault."""

    name: str
    cases: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    faults: dict[str, tuple[int, str]] = field(default_factory=dict)


def fuzz(target: Target, cases: int, seed: int = 0) -> Result:
    """Run ``cases`` of a target; the same seed gives the same cases."""
    result = Result(target.name)
    target.prepare()
    here, environment = os.getcwd(), dict(os.environ)
    logging.getLogger("shardwright").setLevel(logging.CRITICAL)

    @with_seed(seed)
    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(target.draw)
    def one(drawn: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        began = time.process_time()
        try:
            problem = watched(lambda: target.run(folder, drawn), folder)
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(environment)
            shutil.rmtree(folder, ignore_errors=True)
        took = time.process_time() - began
        result.cases, result.seconds, result.slowest = (
            result.cases + 1,
            result.seconds + took,
            max(result.slowest, took),
        )
        if problem is not None:
            count, first = result.faults.get(problem, (0, repr(drawn)[:1500]))
            result.faults[problem] = count + 1, first

    with contextlib.suppress(StopIteration):
        one()
    logging.getLogger("shardwright").setLevel(logging.NOTSET)
    return result
