"""Custom operators for the tests, and a cache of probed rules that is gone after the run."""

from __future__ import annotations

import pytest

from . import custom  # noqa: F401 - registers the operators


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))


@pytest.fixture
def registry():
    """Whatever a test registers is gone after it."""
    from shardwright.operators import deriving
    from shardwright.operators.record import records

    before = dict(records())
    deriving.forget()
    yield
    records().clear()
    records().update(before)
    deriving.forget()
