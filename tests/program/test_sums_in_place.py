"""A sum over ranks takes the place of what it adds up, where nobody reads that again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from program.steps import memory_of, program_of
from shardwright.cluster import Mesh, mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.operators.strategy import Strategy
from shardwright.program import Instruction, Kind, Phase, Program
from shardwright.program.passes import split_backward
from shardwright.program.writer import ProgramWriter

R = Replicate()
ROWS, WIDTH = 64, 32


class Halves(torch.nn.Module):
    """A product in Megatron's two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.into(x))).square().sum()


def made() -> tuple[Graph, Strategy, Mesh]:
    with torch.device("meta"):
        graph = capture(Halves(), (torch.empty(ROWS, WIDTH),))
    splits: dict[str, tuple[str | None, ...]] = {op.name: (None,) for op in graph.ops}
    cut = {graph.inputs[0].tensor: R, **{p.tensor: R for p in graph.parameters}}
    for op in graph.ops[:3]:  # the hidden features are cut: into, relu, and the one that reads them all
        last = op is graph.ops[2]
        for loop in analyse(op, graph.tensors).loops:
            there = loop.inputs[0] if last else loop.outputs[0]
            if there == Shard(1) and (last or len(loop.inputs) < 2 or loop.inputs[1] == Shard(0)):
                splits[op.name] = (loop.name,)
                cut |= {n: p for n, p in zip(op.inputs, loop.inputs, strict=True) if n in graph.parameter_of}
    return graph, Strategy((("gpu", 2),), splits, {n: (p,) for n, p in cut.items()}), mesh_of(parse_cluster("2xH200"))


def sums(program: Program) -> list[Instruction]:
    return [i for i in program.instructions if i.kind is Kind.CHANGE and i.collective == "all_reduce"]


def replaces(program: Program, change: Instruction) -> bool:
    return program.slots[change.writes[0]].alias == change.reads[0]


def test_a_sum_lies_where_its_share_lay() -> None:
    graph, strategy, mesh = made()
    program = program_of(graph, strategy, mesh)
    forward = sums(program)[0]
    assert program.graph.tensors[forward.name].shape == (ROWS, WIDTH) and replaces(program, forward)
    at = program.instructions.index(forward)
    storages = memory_of(graph, strategy, mesh).storages
    assert not any(s.born == at and s.bytes == 4 * ROWS * WIDTH for s in storages)


@pytest.mark.parametrize("reader", ["nobody", "itself", "a view of it", "the caller"])
def test_what_is_read_again_is_left_alone(reader: str) -> None:
    values = [SimpleNamespace(local=SimpleNamespace(bytes=8))]
    writer = ProgramWriter(SimpleNamespace(place=SimpleNamespace(axes=(("gpu", 2),)), values=values, rest={"x": 0}))  # type: ignore[arg-type]
    share, total = writer.slot("y", "value", 8), writer.slot("y", "value", 8)
    seen = writer.slot("y", "value", 8, alias=share)
    writer.compute(Kind.OPERATOR, Phase.FORWARD, "y", (0,), (share,))
    writer.compute(Kind.OPERATOR, Phase.FORWARD, "view", (share,), (seen,))
    writer.communicate(Kind.CHANGE, Phase.FORWARD, "y", "all_reduce", 0, 8, (share,), (total,))
    later = {"itself": (share,), "a view of it": (seen,)}.get(reader, ())
    writer.compute(Kind.OPERATOR, Phase.BACKWARD, "z", (total, *later))
    _, slots = writer.finished([share] if reader == "the caller" else [])
    assert (slots[total].alias == share) == (reader == "nobody")
    assert slots[total].bytes == (0 if reader == "nobody" else 8)


def test_a_parameter_is_left_alone() -> None:
    values = [SimpleNamespace(local=SimpleNamespace(bytes=8))]
    writer = ProgramWriter(SimpleNamespace(place=SimpleNamespace(axes=(("gpu", 2),)), values=values, rest={"x": 0}))  # type: ignore[arg-type]
    total = writer.slot("x", "value", 8)
    writer.communicate(Kind.CHANGE, Phase.FORWARD, "x", "all_reduce", 0, 8, (0,), (total,))
    assert writer.finished([])[1][total].alias == -1


def test_passes_that_are_split_leave_alone_what_the_rest_still_reads() -> None:
    graph, strategy, mesh = made()
    program = program_of(graph, strategy, mesh)
    split = split_backward(program, [])
    for here in (program, split):
        for number, change in enumerate(here.instructions):
            if change in sums(here) and replaces(here, change):
                read = {s for i in here.instructions[number + 1 :] for s in i.reads}
                assert change.reads[0] not in read
    assert not split.sections["I"] and split.sections["W"] == split.sections["B"]
