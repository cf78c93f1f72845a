"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import shardwright.schedules


@pytest.mark.parametrize("name", sorted(m.name for m in pkgutil.iter_modules(shardwright.schedules.__path__)))
def test_examples(name: str) -> None:
    module = importlib.import_module(f"shardwright.schedules.{name}")
    assert doctest.testmod(module).failed == 0
