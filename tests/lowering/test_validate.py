"""A plan that cannot be run is refused before it runs, with the operator's name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from lowering.strategies import mesh_with, random_strategy
from shardwright.errors import LoweringError
from shardwright.frontend import capture
from shardwright.lowering.program import Change, Compute, lower
from shardwright.lowering.validate import validate, validate_program
from shardwright.operators import analyse
from shardwright.operators.strategy import Strategy
from shardwright.search.options import EVERYTHING, splits_of


@pytest.fixture(scope="module")
def graph():
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
    return capture(model, (torch.zeros(8, 8),))


MESH = mesh_with((2, 2))


def test_sound_programs_pass(graph):
    for seed in range(10):
        validate(graph, random_strategy(graph, MESH, seed), MESH)


def test_unknown_loop(graph):
    strategy = random_strategy(graph, MESH, 0)
    splits = {**strategy.splits, graph.ops[1].name: ("nonsense", None)}
    with pytest.raises(LoweringError, match=r"relu.*has no loop 'nonsense'"):
        validate(graph, replace(strategy, splits=splits), MESH)


def test_missing_split(graph):
    strategy = random_strategy(graph, MESH, 0)
    splits = {name: split for name, split in strategy.splits.items() if name != graph.ops[2].name}
    with pytest.raises(LoweringError, match=graph.ops[2].name):
        validate(graph, replace(strategy, splits=splits), MESH)


def test_parameters_do_not_rest_partial(graph):
    strategy = random_strategy(graph, MESH, 0)
    name = graph.parameters[0].tensor
    for layout in ((Partial(), Replicate()), (Shard(5), Replicate())):
        with pytest.raises((LoweringError, IndexError)):
            validate(graph, replace(strategy, resting={**strategy.resting, name: layout}), MESH)


def test_too_many_pieces():
    graph = capture(torch.nn.ReLU(), (torch.zeros(2, 8),))
    strategy = Strategy(MESH.names, {graph.ops[0].name: ("i0", "i0")}, {graph.sources[0]: (Replicate(), Replicate())})
    with pytest.raises(LoweringError, match="cannot be cut into 4 pieces"):
        validate(graph, strategy, MESH)


def programs(graph, kind):
    for seed in range(20):
        program = lower(graph, random_strategy(graph, MESH, seed), MESH, (0, 0), device="meta")
        if any(isinstance(i, kind) for i in program.instructions):
            yield program


def test_dropped_steps_are_noticed(graph):
    """Tampering with a lowered program must not go unnoticed: without its steps a change leads nowhere."""
    checked = 0
    for program in programs(graph, Change):
        for i, instruction in enumerate(program.instructions):
            if isinstance(instruction, Change) and instruction.forward:
                broken = replace(instruction, forward=instruction.forward[:-1])
                instructions = (*program.instructions[:i], broken, *program.instructions[i + 1 :])
                with pytest.raises(LoweringError):
                    validate_program(replace(program, instructions=instructions))
                checked += 1
    assert checked > 20


def test_swapped_inputs_are_noticed(graph):
    """An operator that reads a value in another layout than it needs is named."""
    checked = 0
    for program in programs(graph, Change):
        changes = {i.result: i.source for i in program.instructions if isinstance(i, Change)}
        for i, instruction in enumerate(program.instructions):
            if isinstance(instruction, Compute) and any(name in changes for name in instruction.inputs):
                inputs = tuple(changes.get(name, name) for name in instruction.inputs)
                instructions = (
                    *program.instructions[:i],
                    replace(instruction, inputs=inputs),
                    *program.instructions[i + 1 :],
                )
                with pytest.raises(LoweringError, match=instruction.op.name):
                    validate_program(replace(program, instructions=instructions))
                checked += 1
    assert checked > 10


def test_wrong_local_shapes_are_noticed(graph):
    program = lower(graph, random_strategy(graph, MESH, 3), MESH, (0, 0), device="meta")
    last = next(i for i in reversed(range(len(program.instructions))) if isinstance(program.instructions[i], Compute))
    compute = program.instructions[last]
    assert isinstance(compute, Compute)
    broken = replace(
        compute, op=replace(compute.op, args=(*compute.op.args[:1], 7)), kernel=lambda *x, exchange: x[0][:1]
    )
    instructions = (*program.instructions[:last], broken, *program.instructions[last + 1 :])
    with pytest.raises(LoweringError, match=compute.op.name):
        validate_program(replace(program, instructions=instructions))


@pytest.fixture(scope="module")
def convolution():
    """So small an image that the kernel's rows and columns are loops worth cutting too."""
    return capture(torch.nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False), (torch.zeros(4, 4, 4, 4),))


def test_two_windows_on_one_dim_are_refused(convolution):
    """Output columns and kernel columns both read windows of the image's columns: each is right for the other whole."""
    op = convolution.ops[0]
    rules = analyse(op, convolution.tensors)
    offered = splits_of(op, rules, (2, 2), {}, EVERYTHING)
    assert ("y1", "r1") not in offered and ("r0", "y0") not in offered and ("y0", "y0") not in offered
    assert ("y0", "r1") in offered and ("y0", "y1") in offered and ("n", "r1") in offered
    resting = {name: (Replicate(), Replicate()) for name in convolution.sources}
    for split in (("y1", "r1"), ("r0", "y0"), ("y0", "y0")):
        with pytest.raises(LoweringError, match=rf"{op.name}.*'{split[0]}' reads windows"):
            validate(convolution, Strategy(MESH.names, {op.name: split}, resting), MESH)
    for split in (("y0", "r1"), ("y0", "y1"), ("n", "r1")):
        validate(convolution, Strategy(MESH.names, {op.name: split}, resting), MESH)


def test_a_window_beside_another_cut_is_noticed(convolution):
    """The validator does not rely on the lowering's refusal."""
    op = convolution.ops[0]
    resting = {name: (Replicate(), Replicate()) for name in convolution.sources}
    program = lower(convolution, Strategy(MESH.names, {op.name: ("y0", "y1")}, resting), MESH, (0, 0), device="meta")
    place = next(i for i, step in enumerate(program.instructions) if isinstance(step, Change))
    change = program.instructions[place]
    first, second = change.forward
    rows = [replace(need, dim=2) for need in change.layout]
    twice = replace(change, layout=tuple(rows), forward=(first, second._replace(dim=2, wants=first.wants)))
    instructions = (*program.instructions[:place], twice, *program.instructions[place + 1 :])
    with pytest.raises(LoweringError, match="break the nesting"):
        validate_program(replace(program, instructions=instructions))
