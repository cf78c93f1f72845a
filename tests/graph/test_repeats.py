"""Repeated blocks are found in real models, without being told where the layers are."""

from __future__ import annotations

import pytest

from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.graph.repeats import repeated_blocks, representatives
from shardwright.zoo.reference import resolve


def captured(reference: str) -> Graph:
    resolved = resolve(reference)
    return capture(resolved.model, resolved.args, resolved.kwargs)


@pytest.mark.parametrize(
    ("reference", "counts"),
    [
        ("gpt:small,layers=6", [6]),
        ("bert:small,layers=4", [4]),
        ("llama:small,layers=5", [5]),
        ("moe:small,layers=3", [3]),
        ("transformer:small,layers=3", [3, 3]),
        ("wresnet101:small", [2, 3, 22, 2]),
        ("rnn:small,layers=2,seq=7", [7]),
        ("hf:llama:small,num_hidden_layers=7", [7]),
        ("hf:bert:small,num_hidden_layers=5", [5]),
    ],
)
def test_layers_are_found(reference: str, counts: list[int]) -> None:
    graph = captured(reference)
    large = [run for run in repeated_blocks(graph) if run.period >= 8]
    assert [run.count for run in large] == counts
    covered = sum(run.period * run.count for run in large)
    assert covered > 0.6 * len(graph.ops)


def test_runs_do_not_overlap_and_repeat_exactly() -> None:
    graph = captured("transformer:small,layers=4")
    end = 0
    for run in repeated_blocks(graph):
        assert run.start >= end
        end = run.stop
        for index in range(run.start, run.stop - run.period):
            here, later = graph.ops[index], graph.ops[index + run.period]
            assert here.target == later.target
            assert [graph.tensors[n].shape for n in here.inputs] == [graph.tensors[n].shape for n in later.inputs]


def test_every_operator_has_a_representative_of_its_kind() -> None:
    graph = captured("gpt:small,layers=6")
    table = representatives(graph)
    by_name = {op.name: op for op in graph.ops}
    assert set(table) == set(by_name)
    assert all(by_name[name].target == by_name[first].target for name, first in table.items())
    assert len(set(table.values())) < 0.3 * len(graph.ops)


def test_a_model_without_repetition_has_none() -> None:
    assert repeated_blocks(captured("alexnet:small")) == ()
