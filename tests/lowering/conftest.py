"""The shared pool of worker processes as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.pool import POOL, Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    yield POOL
