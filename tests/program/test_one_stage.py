"""A plan on one mesh, said as one stage, does the same; only that gradients go home after the last pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.cli._program import rank_lines
from shardwright.plans import Plan
from shardwright.program.instructions import Instruction
from shardwright.program.passes import reduced_apart
from shardwright.runtime.assistant.fewer import as_one_stage

PLANS = Path(__file__).resolve().parents[2] / "bench" / "predictions" / "plans"


@pytest.mark.parametrize(
    "name", ["recipe-fsdp", "recipe-megatron", "recipe-zero-1", "recomputed-megatron-sp", "several-results-fsdp"]
)
def test_the_same_instructions_in_the_same_order(name: str) -> None:
    plan = Plan.load(PLANS / f"{name}.json")
    graph = plan.graph()
    staged = as_one_stage(plan, graph, range(plan.devices))
    for rank in (0, plan.devices - 1):
        mesh, stage = rank_lines(plan, graph, rank), rank_lines(staged, graph, rank)
        program = mesh[0].program
        assert program is not None
        once = {*reduced_apart(program).sections["R"]}
        passes = [line.instruction for number, line in enumerate(mesh) if number not in once]
        home = [line.instruction for number, line in enumerate(mesh) if number in once]
        update = passes.pop()
        told = [_what(line.instruction) for line in stage]
        assert told[: len(passes)] == [_what(one) for one in passes]
        assert [_kept(one) for one in told[len(passes) :]] == [_kept(_what(one)) for one in (*home, update)]


def _what(one: Instruction) -> Instruction:
    """All but the numbers of other instructions and of the micro-batch."""
    return one._replace(after=(), microbatch=0)


def _kept(one: Instruction) -> Instruction:
    """What goes home are gradients that were kept back over all micro-batches: values of their own."""
    return one._replace(reads=(), writes=(), last=(), early=())
