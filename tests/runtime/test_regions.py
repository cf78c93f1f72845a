"""Regions of a program as one function each: the numbers of one process, whatever the loop does, and one function for equal
blocks. What the compiler does with a function is replaced by the function itself, but for one small one."""

from __future__ import annotations

import pytest
import torch

from runtime.test_replay import same_as_one_process
from shardwright._torch_compat import compiled_function
from shardwright.errors import RunError
from shardwright.runtime import regions


def uncompiled(function, tensors):
    """Does what compiled code does: takes the list, and gives what the function gives."""

    def call(given):
        taken = list(given)
        given.clear()
        return function(taken)

    return call


def in_regions(rank: int, name: str, sizes: tuple[int, ...], replayed: bool) -> tuple[int, int, int]:
    before, regions.compiled_function = regions.compiled_function, uncompiled
    executors = []

    def prepare(parallel):
        with pytest.raises(RunError, match="fullgraph=True"):
            parallel.compile(fullgraph=True)
        parallel.compile()
        executors.append(parallel._planned.executor)

    try:
        replays = same_as_one_process(rank, name, sizes, prepare, replayed)
    finally:
        regions.compiled_function = before
    tables, functions = executors[0]._tables, executors[0]._compiled.functions
    found = [act for table in tables.values() for _, act, _ in table if isinstance(act, regions._Region)]
    kinds = {region.alike for region in found}
    assert None not in functions.values()
    return replays, len(found), len(kinds)


@pytest.mark.parametrize(("name", "sizes", "replayed"), [("zero1", (4,), False), ("zero3", (2, 2), True)])
def test_regions_train_as_one_process_does(pool, name, sizes, replayed):
    for replays, found, kinds in pool.run(in_regions, name, sizes, replayed):
        assert bool(replays) == replayed
        assert 0 < kinds < found  # equal blocks share


def test_compiled_code_frees_what_it_was_given():
    x, y = torch.randn(8, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    call = compiled_function(lambda given: [(given[0] * given[1]).tanh().sum(0)], [x, y])
    given = [x, y]
    torch.testing.assert_close(call(given)[0], (x * y).tanh().sum(0))
    assert not given
