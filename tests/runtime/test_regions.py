"""Regions of a program as one function each: the numbers of one process, whatever the loop does, and one function for equal
blocks. What the compiler does with a function is replaced by the function itself, but for one small one."""

from __future__ import annotations

import logging

import pytest
import torch

from runtime.test_replay import Breaking, same_as_one_process
from shardwright._torch_compat import compiled_function, plain_operators
from shardwright.cluster import parse_cluster
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize, regions
from shardwright.runtime.actions import Forward
from shardwright.runtime.executor import TRACED_AFTER


def uncompiled(traced):
    """Does what compiled code does: takes the list, and gives what the operators give."""

    def call(given):
        taken = list(given)
        given.clear()
        return traced(*taken)

    return call


def unrunnable(traced):
    """Compiles, and fails when it is run, as a kernel does that asks for more shared memory than there is."""

    def call(given):
        given.clear()
        raise RuntimeError("out of resource: shared memory")

    return call


def in_regions(
    rank: int, name: str, sizes: tuple[int, ...], replayed: bool, compiler=uncompiled, recorder=None
) -> tuple[int, int, int]:
    before, regions.compiled_function = regions.compiled_function, compiler
    executors = []

    def prepare(parallel):
        with pytest.raises(RunError, match="fullgraph=True"):
            parallel.compile(fullgraph=True)
        parallel.compile()
        executors.append(parallel._planned.executor)

    try:
        replays = same_as_one_process(rank, name, sizes, prepare, replayed, recorder)
    finally:
        regions.compiled_function = before
    tables, functions = executors[0]._compiled.tables, executors[0]._compiled.functions
    found = [act for table in tables.values() for _, act, _ in table if isinstance(act, regions._Region)]
    kinds = {region.alike for region in found}
    if compiler is unrunnable:
        assert set(functions.values()) == {None}
    else:
        assert None not in functions.values()
        assert any(function.kept for function in functions.values())  # the rest is computed again
    return replays, len(found), len(kinds)


@pytest.mark.parametrize(("name", "sizes", "replayed"), [("zero1", (4,), False), ("zero3", (2, 2), True)])
def test_regions_train_as_one_process_does(pool, name, sizes, replayed):
    for replays, found, kinds in pool.run(in_regions, name, sizes, replayed):
        assert bool(replays) == replayed
        assert 0 < kinds < found  # equal blocks share


def failing(rank: int, compiler, recorder) -> tuple[int, int, int, list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shardwright").addHandler(handler)
    try:
        return *in_regions(rank, "zero1", (4,), recorder is not None, compiler, recorder), said
    finally:
        logging.getLogger("shardwright").removeHandler(handler)


def test_code_that_compiles_but_cannot_run_is_told_once_for_equal_blocks_and_run_one_by_one(pool):
    for replays, found, kinds, said in pool.run(failing, unrunnable, None):
        assert replays == 0 and kinds <= len(said) <= found
        assert all(line.endswith("the program runs uncompiled: out of resource: shared memory") for line in said)


def test_a_failed_recording_of_compiled_passes_leaves_compiled_passes_and_one_line(pool):
    for replays, found, _, said in pool.run(failing, uncompiled, Breaking("forward")):
        assert replays == 0 and found and len(said) == 1
        assert said[0] == "The step is run without CUDA graphs: no 12 bytes."


def while_recorded(rank: int) -> int:
    """Every region is met for the first time amid a capture."""
    before, regions._recorded = regions._recorded, lambda tensors: True
    executors = []

    def prepare(parallel):
        parallel.compile()
        executors.append(parallel._planned.executor)

    try:
        same_as_one_process(rank, "zero1", (4,), prepare, False)
    finally:
        regions._recorded = before
    return len(executors[0]._compiled.functions)


def test_nothing_is_compiled_while_a_recording_is_made(pool):
    assert pool.run(while_recorded) == [0, 0, 0, 0]


def test_compiled_code_frees_what_it_was_given():
    x, y = torch.randn(8, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    call = compiled_function(plain_operators(lambda given: [(given[0] * given[1]).tanh().sum(0)], [x, y]))
    given = [x, y]
    torch.testing.assert_close(call(given)[0], (x * y).tanh().sum(0))
    assert not given


class Dropping(torch.nn.Module):
    """Blocks with dropout, and a mean over labels some of which are ignored, unevenly between ranks."""

    def __init__(self) -> None:
        super().__init__()
        parts = [[torch.nn.Linear(16, 16), torch.nn.Dropout(0.25), torch.nn.GELU()] for _ in range(3)]
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*part) for part in parts)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(x, labels)


def dropping(rank: int) -> tuple[list[torch.Tensor], list[str]]:
    """Losses with gradients of passes that are recorded, traced, and in regions (twice with one seed, once with another),
    and the operators that are in no region."""
    torch.manual_seed(0)
    model = Dropping().double()
    args = torch.randn(8, 16, dtype=torch.float64), torch.tensor([1, -100, 3, 4, -100, -100, 7, 8])
    graph = capture(model, args)
    plan = plan_graph(graph, parse_cluster("4xH100"), Options("data-parallel", (), fewer_devices=False))
    parallel = parallelize(model, plan, graph=graph, device="cpu")
    execution = parallel._planned
    execution.record_nothing()

    def one_pass(seed: int) -> torch.Tensor:
        parallel.zero_grad()
        torch.manual_seed(seed)
        loss = parallel(*args)
        loss.backward()
        return torch.cat([loss.detach().reshape(1), *(p.grad.to_local().flatten() for p in parallel.parameters())])

    found = [one_pass(1) for _ in range(TRACED_AFTER + 1)]
    before, regions.compiled_function = regions.compiled_function, uncompiled
    try:
        parallel.compile()
        found += [one_pass(1), one_pass(1), one_pass(2)]
    finally:
        regions.compiled_function = before
    table = execution.executor._compiled.tables["F"]
    return found, [execution.executor.program.instructions[n].name for n, act, _ in table if isinstance(act, Forward)]


def test_random_numbers_and_counted_labels_do_not_cut_regions(pool):
    for found, outside in pool.run(dropping):
        first, *alike, other = found
        for numbers in alike:
            torch.testing.assert_close(numbers, first, rtol=1e-12, atol=1e-14)
        assert (other - first).abs().max() > 1e-3
        assert not outside
