"""Calls that a plan knows beside its own: the model runs as it is, whatever the graphs in the plan say."""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.errors import PlanError, RunError
from shardwright.graph import Graph
from shardwright.plans import Plan, from_json, to_json
from shardwright.runtime import parallelize
from shardwright.runtime.calling import example


class Model(nn.Module):
    """Its evaluation takes a branch that training does not."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(16, 32), nn.Linear(32, 4), scale

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.b(torch.relu(self.a(x)))
        return y if self.training else torch.softmax(y * self.scale, -1)


X = torch.linspace(-1, 1, 8 * 16).view(8, 16)


@functools.cache
def planned() -> Plan:
    with torch.device("meta"):
        model, x = Model(), torch.empty(8, 16)
        return shardwright.plan(
            model, (x,), cluster="local:2", also=[((x,), {}, False), ((x, None), {}, False)], fewer_devices=False
        )


@contextmanager
def heard() -> Iterator[list[str]]:
    """What the logger says meanwhile, from warnings on."""
    found: list[str] = []
    handler, log = logging.Handler(logging.WARNING), logging.getLogger("shardwright")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def evaluates(rank: int, text: str, scale: float) -> list[str]:
    torch.manual_seed(0)
    model = Model(scale)
    theirs, ours = copy.deepcopy(model), parallelize(model, from_json(text))
    torch.testing.assert_close(ours(X), theirs(X))
    with heard() as warnings, torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(ours.eval()(x=X), theirs.eval()(X))
    return warnings


def edited(change: Callable[[Graph], Graph]) -> str:
    """The plan with other graphs of the calls it knows."""
    made = planned()
    return to_json(replace(made, also=tuple(change(one) for one in made.other_graphs())))


def negated(graph: Graph) -> Graph:
    ops = [replace(op, target="aten.neg.default") if op.target == "aten.relu.default" else op for op in graph.ops]
    return replace(graph, ops=tuple(ops))


def test_an_edited_branch_runs_as_it_is_now_and_the_plan_is_said_to_be_older(pair) -> None:
    text = to_json(planned())
    assert pair.run(evaluates, text, 2.0) == [[], []]
    first, second = pair.run(evaluates, text, 3.0)
    assert second == [] and len(first) == 1
    assert "mul(3.0)" in first[0] and "instead of mul(2.0)" in first[0] and "Plan again" in first[0]


def test_a_graph_that_was_tampered_with_computes_nothing(pair) -> None:
    first, _ = pair.run(evaluates, edited(negated), 2.0)
    assert len(first) == 1 and "relu() at" in first[0] and "instead of neg()" in first[0]


def with_tree(graph: Graph, tree: dict[str, Any]) -> Graph:
    """Its call, as pytree would read it."""
    return replace(
        graph, input_tree=json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [tree]}])
    )


TREES = {
    "an enumeration": {"type": "builtins.dict", "context": '[{"__enum__": true, "fqn": "canary:K", "name": "a"}]'},
    "a factory": {
        "type": "collections.defaultdict",
        "context": {"default_factory_module": "canary", "default_factory_name": "K", "dict_context": []},
    },
    "an unknown class": {"type": "canary.K", "context": "null"},
}


@pytest.mark.parametrize("what", TREES)
def test_the_structure_of_a_call_imports_nothing(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules named in the tree of a plan's graph were imported by pytree, or to restore it."""
    (tmp_path / "canary.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass K: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    graph = with_tree(planned().graph(), {**TREES[what], "children_spec": []})
    with pytest.raises(RunError, match="Pass example inputs"):
        example(graph)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_graph_is_refused_when_the_job_starts() -> None:
    data = json.loads(to_json(planned()))
    data["also"][0] = data["also"][0][:40]
    with pytest.raises(PlanError, match="graph inside the plan is incomplete"):
        from_json(json.dumps(data)).other_graphs(trusted=True)
