"""Shared fixtures: where the public benchmark data lies, and the pool of worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.pool import POOL, Pool

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public benchmark data beside the checkout; tests skip where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"public benchmark data not found at {folder}")
    return folder


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    yield POOL
