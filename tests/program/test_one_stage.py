"""One mesh is one stage with one micro-batch: its step is its program, section by section."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.pipelines import pipeline_plan
from shardwright.cli.explain import rank_lines
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.program import Program, build
from shardwright.program.microbatches import microbatches
from shardwright.program.passes import reduced_apart, split_backward
from shardwright.program.pipeline import Pipeline, check
from shardwright.program.stages import stage_graphs
from shardwright.program.validate import validate_program

PLANS = Path(__file__).resolve().parents[2] / "bench" / "predictions" / "plans"
ONE_MESH = ["recipe-fsdp", "recipe-megatron", "recipe-zero-1", "recomputed-megatron-sp", "several-results-fsdp"]


def _built(plan: Plan, graph: Graph, rank: int) -> Program:
    (stage,), (mesh,) = plan.stages, plan.meshes
    decisions = replace(stage.decisions, otherwise=PricedDecisions(mesh))
    return build(graph, stage.strategy, decisions, mesh.coordinates(rank), device="cuda", optimizer=plan.optimizer)


@pytest.mark.parametrize("name", ONE_MESH)
def test_the_step_of_one_mesh_is_its_program(name: str) -> None:
    plan = Plan.load(PLANS / f"{name}.json")
    graph = plan.graph()
    for rank in (0, plan.devices - 1):
        lines = rank_lines(plan, graph, rank)
        assert tuple(line.instruction for line in lines) == _built(plan, graph, rank).instructions


@pytest.mark.parametrize("name", ONE_MESH)
def test_every_instruction_has_its_section(name: str) -> None:
    """With gradients reduced inside the backward pass or after it, and with that in two: the same instructions, sound."""
    plan = Plan.load(PLANS / f"{name}.json")
    whole = _built(plan, plan.graph(), 0)
    assert [n for kind in "FBU" for n in whole.sections[kind]] == list(range(len(whole.instructions)))
    for program in (whole, reduced_apart(whole), split_backward(whole, [])):
        validate_program(program)
        sections = program.sections
        assert sorted(n for kind in "FBRU" for n in sections.get(kind, ())) == list(range(len(whole.instructions)))
        assert sorted(str(i.kind) for i in program.instructions) == sorted(str(i.kind) for i in whole.instructions)
        assert "I" not in sections or sections["I"] + sections["W"] == sections["B"]
        if "R" in sections:
            assert set(program.arrivals) <= set(sections["R"])
            assert set(program.performed["B"]) == {*sections["B"], *program.arrivals}
        if "I" in sections:
            assert program.performed["I"] + program.performed["W"] == program.performed["B"]


def test_accumulation_reduces_after_the_last_pass() -> None:
    plan = Plan.load(PLANS / "accumulation.json")
    lines = rank_lines(plan, plan.graph(), 0)
    count, program = plan.microbatches, lines[0].program
    assert program is not None and count > 1
    found: dict[int, list[str]] = {}
    for line in lines:
        found.setdefault(line.instruction.microbatch, []).append(str(line.instruction.kind))
    told = {kind: [str(program.instructions[n].kind) for n in numbers] for kind, numbers in program.sections.items()}
    assert found.pop(count) == told["R"] + told["U"]
    assert list(found.values()) == [told["F"] + told["B"]] * count


class _Left(torch.nn.Module):
    """Hands out an input and a number, twice the same result, and does not read all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, unread: torch.Tensor, factor: float = 2.0) -> tuple[object, ...]:
        y = self.used(x) * factor
        return y, x, y, 3


def test_cutting_into_one_part_changes_nothing() -> None:
    graph = capture(_Left(), (torch.zeros(8, 4), torch.zeros(8, 2)))
    assert microbatches(graph, 1).graphs == {1: graph}
    (part,) = stage_graphs(graph, [[op.name for op in graph.ops]])
    assert part.graph is graph
    assert not part.received and not part.sent and part.wanted == ()
    for count in (1, 2):
        plan = pipeline_plan(graph, [[op.name for op in graph.ops]], count, "1f1b")
        cut = Pipeline.of(graph, plan.stages, count, plan.schedule)
        check(cut)
        step = cut.step(0, [PricedDecisions(plan.meshes[0])])
        assert (
            [str(task.action) for task in step.tasks] == ["0F0", "0B0", "0U0"]
            if count == 1
            else ["0F0", "0B0", "0F1", "0B1", "0R2", "0U2"]
        )
        for program in step.programs.values():
            validate_program(program)
