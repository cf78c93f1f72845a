"""Compilation does not count as search."""

from __future__ import annotations

from numba import njit

from shardwright.search.choose import compiling


def test_compilation_is_timed_and_cached_calls_are_not():
    @njit
    def inner(x):
        return x + 1

    @njit
    def outer(x):
        return inner(x) * 2

    before = compiling.seconds()
    assert outer(1) == 4
    first = compiling.seconds() - before
    assert first > 0.01
    assert outer(2) == 6
    assert compiling.seconds() - before == first
