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


def pytest_collection_finish() -> None:
    gc.collect()
    seldom_collect()  # and all that test modules imported


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
