"""The examples in the docstrings do what they say.

An example that speaks of what only the reader has (``model``, ``graph``, a file) is an illustration: it ends where that
comes up. Everything before that, and every example that speaks of nothing else, must give what is written under it.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import bench.published
import shardwright
from shardwright.operators.deriving import forget
from shardwright.operators.record import records

READERS = {
    "IPython",
    "args",
    "cluster",
    "graph",
    "kwargs",
    "mesh",
    "model",
    "plan",
    "rules",
    "stated",
    "step",
    "strategy",
    "timeline",
    "walk",
    "x",
}
MODULES = sorted(
    module.name
    for package in (shardwright, bench.published)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


class Reader(doctest.DocTestRunner):
    """Counts what is right and leaves alone what belongs to the reader."""

    def __init__(self) -> None:
        super().__init__(optionflags=doctest.ELLIPSIS)
        self.wrong: list[str] = []
        self._illustrated = False

    def report_start(self, out, test, example):
        self._illustrated &= example is not test.examples[0]

    def report_failure(self, out, test, example, got):
        if not self._illustrated:
            self.wrong.append(f"{test.name}: {example.source.strip()}\n  expected {example.want!r}, got {got!r}")

    def report_unexpected_exception(self, out, test, example, exc_info):
        self._illustrated |= belongs_to_the_reader(exc_info[1])
        if not self._illustrated:
            self.wrong.append(f"{test.name}: {example.source.strip()}\n  {exc_info[1]!r}")


def belongs_to_the_reader(error: BaseException) -> bool:
    """A name, a file or a notebook that only the reader has."""
    if isinstance(error, NameError | ModuleNotFoundError):
        return error.name in READERS
    return isinstance(error, shardwright.ShardwrightError) and "No such file" in str(error)


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))


@pytest.fixture(autouse=True)
def private_registries():
    """Examples describe operators of their own; whoever runs afterwards does not know them."""
    before = dict(records())
    yield
    records().clear()
    records().update(before)
    forget()


def test_every_example_runs():
    finder, reader, tried = doctest.DocTestFinder(), Reader(), 0
    for name in MODULES:
        if not name.endswith("__main__"):
            for example in finder.find(importlib.import_module(name), extraglobs={"torch": torch}):
                tried += reader.run(example, out=lambda text: None).attempted
    assert not reader.wrong, "\n".join(reader.wrong)
    assert tried > 100
