"""A plan that cannot be run is refused before it runs, with the operator's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from lowering.strategies import mesh_with, random_strategy
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.errors import LoweringError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.operators.rules import LoopRule, OpRules
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.program import Decisions, Kind, build
from shardwright.program.binding import Place, bind
from shardwright.program.dataflow import Compute, LayoutChange, dataflow
from shardwright.program.passes import reduced_apart
from shardwright.program.pipeline import Pipeline
from shardwright.program.steps import Step
from shardwright.program.validate import validate as validate_plan
from shardwright.program.validate import validate_dataflow, validate_program, validate_together
from shardwright.search.options import EVERYTHING, splits_of


@pytest.fixture(scope="module")
def graph():
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
    return capture(model, (torch.zeros(8, 8),))


MESH = mesh_with((2, 2))
DECISIONS = PricedDecisions(MESH)


def validate(graph: Graph, strategy: Strategy, decisions: Decisions) -> None:
    """A strategy alone: one stage."""
    plan = Plan.of(graph, strategy)
    validate_plan(Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule), [decisions])


def test_sound_programs_pass(graph):
    for seed in range(10):
        validate(graph, random_strategy(graph, MESH, seed), DECISIONS)


def test_unknown_loop(graph):
    strategy = random_strategy(graph, MESH, 0)
    splits = {**strategy.splits, graph.ops[1].name: ("nonsense", None)}
    with pytest.raises(LoweringError, match=r"relu.*has no loop 'nonsense'"):
        validate(graph, replace(strategy, splits=splits), DECISIONS)


def test_missing_split(graph):
    strategy = random_strategy(graph, MESH, 0)
    splits = {name: split for name, split in strategy.splits.items() if name != graph.ops[2].name}
    with pytest.raises(LoweringError, match=graph.ops[2].name):
        validate(graph, replace(strategy, splits=splits), DECISIONS)


def test_parameters_do_not_rest_partial(graph):
    strategy = random_strategy(graph, MESH, 0)
    name = graph.parameters[0].tensor
    for layout in ((Partial(), Replicate()), (Shard(5), Replicate())):
        with pytest.raises((LoweringError, IndexError)):
            validate(graph, replace(strategy, resting={**strategy.resting, name: layout}), DECISIONS)


def test_too_many_pieces():
    graph = capture(torch.nn.ReLU(), (torch.zeros(2, 8),))
    strategy = Strategy(MESH.names, {graph.ops[0].name: ("i0", "i0")}, {graph.sources[0]: (Replicate(), Replicate())})
    with pytest.raises(LoweringError, match="cannot be cut into 4 pieces"):
        validate(graph, strategy, DECISIONS)


def flows(graph, seeds=20):
    for seed in range(seeds):
        flow = dataflow(graph, random_strategy(graph, MESH, seed), (0, 0), DECISIONS)
        if any(isinstance(node, LayoutChange) for node in flow.nodes):
            yield flow


def with_node(flow, number, node):
    return replace(flow, nodes=(*flow.nodes[:number], node, *flow.nodes[number + 1 :]))


def test_dropped_steps_are_noticed(graph):
    """Tampering with a dataflow must not go unnoticed: without its steps a change leads nowhere."""
    checked = 0
    for flow in flows(graph):
        for number, node in enumerate(flow.nodes):
            if isinstance(node, LayoutChange) and node.forward:
                with pytest.raises(LoweringError):
                    validate_dataflow(with_node(flow, number, replace(node, forward=node.forward[:-1])))
                checked += 1
    assert checked > 20


def test_swapped_inputs_are_noticed(graph):
    """An operator that reads a value in another layout than it needs is named."""
    checked = 0
    for flow in flows(graph):
        changes = {node.result: node.source for node in flow.nodes if isinstance(node, LayoutChange)}
        for number, node in enumerate(flow.nodes):
            if isinstance(node, Compute) and any(value in changes for value in node.inputs):
                inputs = tuple(changes.get(value, value) for value in node.inputs)
                with pytest.raises(LoweringError, match=node.op.name):
                    validate_dataflow(with_node(flow, number, replace(node, inputs=inputs)))
                checked += 1
    assert checked > 10


def test_wrong_local_shapes_are_noticed(graph):
    flow = dataflow(graph, random_strategy(graph, MESH, 3), (0, 0), DECISIONS)
    number = max(n for n, node in enumerate(flow.nodes) if isinstance(node, Compute))
    node = flow.nodes[number]
    result = node.footprint.results[0]
    shorter = replace(result, tensor=replace(result.tensor, shape=(1, *result.tensor.shape[1:])))
    with pytest.raises(LoweringError, match=node.op.name):
        validate_dataflow(with_node(flow, number, replace(node, footprint=replace(node.footprint, results=(shorter,)))))


def test_programs_that_read_what_is_not_there_or_never_wait_are_noticed(graph):
    """Dropping any instruction that makes a value, or that waits, is noticed."""
    checked = 0
    for seed in range(6):
        program = build(graph, random_strategy(graph, MESH, seed), DECISIONS, (0, 0))
        validate_program(program)
        read = {slot for instruction in program.instructions for slot in instruction.reads}
        legs = {n for i in program.instructions if i.kind is Kind.REDUCE for n in i.after}  # each awaits the one before
        for number, instruction in enumerate(program.instructions):
            makes = any(slot in read for slot in instruction.writes)
            waits = instruction.kind is Kind.AWAIT and not legs.issuperset(instruction.after)
            if not (makes or waits) or instruction.kind is Kind.REDUCE:
                continue
            blank = instruction._replace(writes=(), reads=(), after=(), last=())
            instructions = (*program.instructions[:number], blank, *program.instructions[number + 1 :])
            with pytest.raises(LoweringError, match="instruction"):
                validate_program(replace(program, instructions=instructions))
            checked += 1
    assert checked > 50


def test_ranks_that_do_not_meet_are_noticed(graph):
    """A collective that one rank leaves out, or sends otherwise, is named with both ranks."""
    strategy = next(
        s
        for s in (random_strategy(graph, MESH, seed) for seed in range(20))
        if sum(bool(i.collective) for i in build(graph, s, DECISIONS, (0, 0)).instructions) > 3
    )
    programs = {place: build(graph, strategy, DECISIONS, place) for place in ((0, 0), (0, 1), (1, 0), (1, 1))}
    validate_together(programs)
    program = programs[1, 1]
    for number, instruction in enumerate(program.instructions):
        if instruction.collective:
            for broken in (instruction._replace(collective=""), instruction._replace(bytes=instruction.bytes + 1)):
                instructions = (*program.instructions[:number], broken, *program.instructions[number + 1 :])
                with pytest.raises(LoweringError, match=r"\(1, 1\) do not meet|do not meet"):
                    validate_together({**programs, (1, 1): replace(program, instructions=instructions)})


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
            validate(convolution, Strategy(MESH.names, {op.name: split}, resting), DECISIONS)
    for split in (("y0", "r1"), ("y0", "y1"), ("n", "r1")):
        validate(convolution, Strategy(MESH.names, {op.name: split}, resting), DECISIONS)


def test_a_window_beside_another_cut_is_noticed(convolution):
    """The validator does not rely on the builder's refusal."""
    op = convolution.ops[0]
    resting = {name: (Replicate(), Replicate()) for name in convolution.sources}
    flow = dataflow(convolution, Strategy(MESH.names, {op.name: ("y0", "y1")}, resting), (0, 0), DECISIONS)
    number = next(n for n, node in enumerate(flow.nodes) if isinstance(node, LayoutChange))
    change = flow.nodes[number]
    first, second = change.forward
    values = list(flow.values)
    rows = tuple(replace(need, dim=2) for need in values[change.result].needs)
    values[change.result] = replace(values[change.result], needs=rows)
    twice = replace(change, forward=(first, second._replace(dim=2, wants=first.wants)))
    with pytest.raises(LoweringError, match="break the nesting"):
        validate_dataflow(replace(with_node(flow, number, twice), values=tuple(values)))


def test_a_dim_or_a_loop_that_is_not_there_is_refused() -> None:
    """Plans come from files: routes of numbers without dims, splits along loops of other operators."""
    place = Place((("a", 2),), (0,), (2,))
    step = Step("reduce_scatter", 0, None, None, 8, 4, "sum")
    with pytest.raises(LoweringError, match="does not apply"):
        bind((step,), (Partial(),), (), place)
    rules = OpRules((LoopRule("i", 4, (Shard(0),), (Shard(0),)),), "described", "matmul")
    with pytest.raises(LoweringError, match="cut along 'n'; its loops are i"):
        rules.layouts(("n",), "inputs", 1)


STORED = Path(__file__).resolve().parents[2] / "bench" / "predictions" / "plans"


@pytest.mark.parametrize("name", ["accumulation", "inference-gpt", "schedule-zb-v", "stages-two-axes", "unet-stages"])
def test_plans_of_every_kind_are_proved_alike(name: str) -> None:
    """One mesh, accumulation and pipelines: every program of every rank, and all of them together."""
    plan = Plan.load(STORED / f"{name}.json")
    graph = plan.graph(trusted=True)
    cut = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule, plan.batch_norm)
    decisions = [
        replace(s.decisions, otherwise=PricedDecisions(m)) for s, m in zip(plan.stages, plan.meshes, strict=True)
    ]
    validate_plan(cut, decisions)


def test_instructions_without_a_section_and_reductions_that_read_a_pass_are_noticed(graph):
    program = reduced_apart(build(graph, random_strategy(graph, MESH, 0), DECISIONS, (0, 0)))
    validate_program(program)
    sections = program.sections
    with pytest.raises(LoweringError, match="is not in exactly one section"):
        validate_program(replace(program, sections={**sections, "B": sections["B"][:-1]}))
    with pytest.raises(LoweringError, match="is not in exactly one section"):
        validate_program(replace(program, sections={**sections, "F": (*sections["F"], sections["R"][-1])}))
    later = next(
        n for n in sections["B"] if any(program.slots[s].role == "gradient" for s in program.instructions[n].reads)
    )
    moved = tuple(n for n in sections["B"] if n != later)
    with pytest.raises(LoweringError, match="reads"):
        validate_program(
            replace(program, sections={**sections, "B": moved, "R": tuple(sorted((*sections["R"], later)))})
        )
