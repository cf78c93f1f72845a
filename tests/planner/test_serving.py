"""Plans for inference: forward only, priced as such, for latency or throughput, called with the numbers of one process."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main
from shardwright.cluster import parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph, plan_serving
from shardwright.planner.serving import seconds_per_call
from shardwright.plans import Plan, from_json, to_json
from shardwright.plans.plan import Signature
from shardwright.program import build
from shardwright.program.instructions import Phase
from shardwright.verification.prepare import subject
from shardwright.verification.verify import verify_rank
from shardwright.zoo.reference import resolve

pytest.importorskip("transformers")
QUICK = Options(baselines=(), recompute="none", fewer_devices=False)


@functools.lru_cache
def graph_of(calls: int = 1, inference: bool = True) -> Graph:
    resolved = resolve("hf:gpt2:small,num_hidden_layers=1", batch=2 * calls, seq=8, inference=inference)
    return capture(resolved.model, resolved.args, resolved.kwargs)


def test_there_is_neither_backward_nor_optimizer() -> None:
    cluster = parse_cluster("2xH100")
    plan = plan_serving(graph_of, cluster, QUICK)
    training = plan_graph(graph_of(inference=False), cluster, QUICK)
    instructions = build(
        plan.graph(), plan.stages[0].strategy, plan.stages[0].decisions, (0,), training=False
    ).instructions
    assert {i.phase for i in instructions} == {Phase.FORWARD}
    assert plan.prediction.memory_bytes < training.prediction.memory_bytes
    assert plan.prediction.step_seconds < 0.5 * training.prediction.step_seconds
    assert plan.proof.step_bound <= plan.prediction.step_seconds
    assert from_json(to_json(plan)).serving == plan.serving


def test_throughput_takes_waiting_calls_together() -> None:
    cluster, options = parse_cluster("2xH100"), replace(QUICK, search="data-parallel")
    latency, throughput = (plan_serving(graph_of, cluster, options, objective=o) for o in ("latency", "throughput"))
    assert throughput.serving is not None and throughput.serving.calls == 2
    assert seconds_per_call(throughput) < seconds_per_call(latency)  # each call is tiny, its launches are not
    with pytest.raises(ShardwrightError, match="training mode"):
        plan_serving(lambda calls: graph_of(calls, inference=False), cluster, QUICK)


def served() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    found = resolve("hf:gpt2:small,num_hidden_layers=1", batch=2, seq=2, device="cpu", inference=True, cache=6)
    return found.model, found.args, found.kwargs


def decodes(rank: int, text: str) -> bool | None:
    graph = subject(served, True, True).graph
    plan = replace(from_json(text), signature=Signature.of(graph), captured=graph)
    found = verify_rank(served, {True: plan}, 2, False, True, inference=True)
    return None if found is None else found.agrees and found.cuts and not found.runs[0].worst("gradient")


def test_a_decoder_with_its_cache_gives_the_outputs_of_one_process(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / "plan.json")
    model = ["hf:gpt2:small,num_hidden_layers=1", "--batch", "2", "--seq", "2"]
    asked = ["--cluster", "4xH100", "--inference", "--cache", "6", "--search", "megatron", "--all-devices"]
    monkeypatch.setattr(sys, "argv", ["shardwright", "plan", *model, *asked, "-o", where, "--json"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    assert json.loads(capsys.readouterr().out)["serving"] == {"objective": "latency", "cache": 6, "calls": 1}
    assert pool.run(decodes, to_json(Plan.load(where)), seconds=200)[0] is True
