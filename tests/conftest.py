"""Shared fixtures: where the public benchmark data lies, and the pool of worker processes."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from runtime.pool import PAIR, POOL, Pool, seldom_collect

seldom_collect()
# Several processes share the cores here, and tensors are tiny: threads of one would only spin until those of another are
# done (ten times slower on a busy machine). Processes that tests start inherit it.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# Caches of the tests' own: what they find must not depend on how this machine was calibrated, and by whom.
CACHES = Path(__file__).resolve().parents[1] / "build" / "test-caches"
os.environ["SHARDWRIGHT_CACHE"] = str(CACHES)
for calibration in CACHES.glob("local-*.toml"):
    calibration.unlink(missing_ok=True)


SLOWEST = (
    "runtime/test_memory_limit.py",
    "reports/test_pipeline_page.py",
    "runtime/assistant/test_moving.py",
    "planner/test_proof.py",
    "runtime/test_features.py",
    "runtime/test_programs.py",
    "reports/test_page.py",
    "runtime/test_killed_ranks.py",
    "runtime/test_regions.py",
    "runtime/test_pipeline.py",
    "verification/test_mutations.py",
    "runtime/test_rare_operators.py",
    "planner/test_planner.py",
    "runtime/test_performed.py",
    "runtime/test_moving.py",
)
"""Begun first: a whole file runs in one process (what its tests share is made once), and none should be left for the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent

    def turn(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.relative_to(folder).as_posix()
        return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST), not name.startswith(("runtime", "reports"))

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    gc.collect()
    seldom_collect()  # and all that test modules imported


def pytest_unconfigure() -> None:
    """A process of xdist may end without doing what atexit was told; workers that are stopped would stay for ever."""
    for workers in (POOL, PAIR):
        workers.close(gently=False)


@pytest.fixture(scope="session")
def published() -> Path:
    """What other people published, to be checked against (tests/data/README.md says whose it is)."""
    return Path(__file__).resolve().parent / "data"


@pytest.fixture(scope="session")
def pool() -> Pool:
    return POOL


@pytest.fixture(scope="session")
def pair() -> Pool:
    return PAIR
