"""Shared fixtures: where the public benchmark data lies, and the pool of worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.pool import POOL, Pool


@pytest.fixture(scope="session")
def published() -> Path:
    """What other people published, to be checked against (tests/data/README.md says whose it is)."""
    return Path(__file__).resolve().parent / "data"


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    yield POOL
