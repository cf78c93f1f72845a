"""Predicted beside measured: a real recording finds its partners, a made-up one says what the matching does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reports.conftest import Planned, planned

from shardwright.errors import ShardwrightError
from shardwright.reports.measured import compare_with, measured_html, read_trace
from shardwright.reports.page import plan_page
from shardwright.reports.steps import rank_steps
from shardwright.runtime.profiling import PROFILE_VARIABLE, WARM_STEPS, profile_if_asked
from shardwright.zoo.reference import resolve


@pytest.fixture(scope="module")
def alone() -> Planned:
    return planned("gpt:small", "1xH100")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of the model in this process, of which one is recorded as ``shardwright run --profile`` does."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    resolved = resolve("gpt:small", batch=8, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROFILE_VARIABLE, str(path))
        profile_if_asked(resolved.model)
    optimizer = torch.optim.AdamW(resolved.model.parameters())
    for step in range(WARM_STEPS + 3):
        resolved.model(*resolved.args, **resolved.kwargs).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert path.exists() == (step > WARM_STEPS), step
    return path


def test_one_step_is_recorded_and_every_operator_finds_its_partner(alone: Planned, recorded: Path) -> None:
    trace = read_trace(recorded)
    step = rank_steps(alone.plan, alone.graph)[0]
    measured = compare_with(step, alone.graph, trace)
    linear = sum(op.target == "aten.linear.default" for op in alone.graph.ops)
    found = {(row.phase, row.what): 0 for row in measured.rows}
    for row in measured.rows:
        found[row.phase, row.what] += row.count
        assert row.measured > 0
    assert found["forward", "linear"] == found["backward", "linear"] == linear
    assert found["forward", "scaled_dot_product_attention"] == found["backward", "scaled_dot_product_attention"]
    assert found["update", "adamw"] == 1
    assert sum(1 for e in trace if e["name"] == "aten::linear") == linear  # of one step, not of several
    took = sum(e["dur"] for e in trace if e["name"] == "aten::linear")
    said = sum(row.measured for row in measured.rows if (row.phase, row.what) == ("forward", "linear"))
    assert said == pytest.approx(took)
    assert measured.matched > 0.9 * measured.events
    sizes = [abs(row.difference) for row in measured.rows]
    assert sizes == sorted(sizes, reverse=True)  # the worst first


def test_it_is_laid_over_the_timeline(alone: Planned, recorded: Path, opened: Any) -> None:
    view = opened(plan_page(alone.plan, alone.graph, why_seconds=0, trace=read_trace(recorded)))
    groups = view.page.evaluate("shardwright.timeline.groups.map((g) => g.title)")
    assert len(groups) == 2 and groups[1].startswith("measured") and view.said == []
    assert "Predicted beside measured" in view.page.inner_text("#timeline")
    assert view.page.evaluate("shardwright.timeline.groups[1].rows[0].ids.length") > 50


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": ts, "dur": dur, "args": args}


def test_kernels_count_where_there_are_any_and_collectives_go_by_their_calls(gpt: Planned, tmp_path: Path) -> None:
    step = rank_steps(gpt.plan, gpt.graph)[0]
    target = "linear"
    call = next(e.collective for e in step.events if e.collective)
    words = {"all_reduce": "allreduce_", "all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_"}
    events = [
        event(f"aten::{target}", 0.0, 10.0, **{"Sequence number": 4}),
        event("cudaLaunchKernel", 2.0, 1.0, "cuda_runtime", correlation=7),
        event("gemm", 30.0, 50.0, "kernel", tid=9, correlation=7),
        event("autograd::engine::evaluate_function: XBackward0", 100.0, 5.0, tid=2, **{"Sequence number": 4}),
        event("cudaLaunchKernel", 101.0, 1.0, "cuda_runtime", tid=2, correlation=8),
        event("gemm_backward", 110.0, 70.0, "kernel", tid=9, correlation=8),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    rows = {row.phase: row for row in compare_with(step, gpt.graph, read_trace(path)).rows}
    assert rows["forward"].measured == pytest.approx(50e-6) and rows["backward"].measured == pytest.approx(70e-6)
    events = [
        event(f"aten::{target}", 0.0, 10.0),
        event(f"c10d::{words[call]}", 20.0, 1.0),
        event("gloo:whatever_it_does", 21.0, 40.0, "user_annotation", tid=5),
    ]
    path.write_text(json.dumps(events))
    measured = compare_with(step, gpt.graph, read_trace(path))
    sent = next(row for row in measured.rows if row.module.startswith("over"))
    assert sent.what == call.replace("_", "-") and sent.measured == pytest.approx(40e-6)
    assert "2 of" in measured_html(measured, step.seconds)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ShardwrightError, match="is not a trace"):
        read_trace(path)
