"""Predicted beside measured: a real recording finds its partners, a made-up one says what the matching does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reports.conftest import Planned, axe_violations, planned

from shardwright.cluster import parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.planner import Options, Pipelining, plan_graph, plan_pipeline
from shardwright.plans import Plan
from shardwright.reports.measured import compare, measured_html
from shardwright.reports.page import plan_page
from shardwright.reports.steps import PlanStep
from shardwright.reports.traces import read_trace, read_traces
from shardwright.runtime import parallelize
from shardwright.runtime.profiling import PROFILE_VARIABLE, WARM_STEPS, profile_if_asked, trace_path
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
    measured = compare(PlanStep.of(alone.plan, alone.graph), [trace])
    linear = sum(op.target == "aten.linear.default" for op in alone.graph.ops)
    found = {(row.phase, row.what): 0 for row in measured.rows}
    for row in measured.rows:
        found[row.phase, row.what] += row.count
        assert row.measured > 0
    assert found["forward", "linear"] == found["backward", "linear"] == linear
    assert found["forward", "scaled_dot_product_attention"] == found["backward", "scaled_dot_product_attention"]
    assert found["update", "optimizer"] == 1
    events = trace.events
    assert sum(1 for e in events if e["name"] == "aten::linear") == linear  # of one step, not of several
    took = sum(e["dur"] for e in events if e["name"] == "aten::linear")
    said = sum(row.measured for row in measured.rows if (row.phase, row.what) == ("forward", "linear"))
    assert said == pytest.approx(took)
    (rank,) = measured.ranks
    assert rank.matched > 0.9 * rank.events
    assert [str(action) for action, *_ in rank.passes] == ["0F0", "0B0"]
    sizes = [abs(row.difference) for row in measured.rows]
    assert sizes == sorted(sizes, reverse=True)  # the worst first


def test_it_is_laid_over_the_timeline(alone: Planned, recorded: Path, opened: Any) -> None:
    view = opened(plan_page(alone.plan, alone.graph, why_seconds=0, traces=read_traces(recorded)))
    groups = view.page.evaluate("shardwright.timeline.groups.map((g) => g.title)")
    assert len(groups) == 2 and groups[1].startswith("measured") and view.said == []
    assert "Predicted beside measured" in view.page.inner_text("#timeline")
    assert view.page.evaluate("shardwright.timeline.groups[1].rows[0].ids.length") > 50


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": ts, "dur": dur, "args": args}


def test_kernels_count_where_there_are_any_and_collectives_go_by_their_calls(gpt: Planned, tmp_path: Path) -> None:
    step = PlanStep.of(gpt.plan, gpt.graph)
    target = "linear"
    call = next(e.collective for e in step.steps[0].stage.events if e.collective)
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
    rows = {row.phase: row for row in compare(step, [read_trace(path)]).rows}
    assert rows["forward"].measured == pytest.approx(50e-6) and rows["backward"].measured == pytest.approx(70e-6)
    events = [
        event(f"aten::{target}", 0.0, 10.0),
        event(f"c10d::{words[call]}", 20.0, 1.0),
        event("gloo:all_reduce", 21.0, 40.0, "user_annotation", tid=5),
    ]
    path.write_text(json.dumps(events))
    measured = compare(step, [read_trace(path)])
    sent = next(row for row in measured.rows if row.module.startswith("over"))
    assert sent.what == call.replace("_", "-") and sent.measured == pytest.approx(40e-6)
    assert "2 of" in measured_html(step, measured)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ShardwrightError, match="is not a trace"):
        read_trace(path)


def planned_for_four(stages: int) -> Plan:
    built = resolve("gpt:small", batch=8, device="cpu")
    graph = capture(built.model, built.args, built.kwargs)
    cluster, options = parse_cluster("local:4"), Options(search="fsdp", fewer_devices=False, baselines=())
    if stages:
        return plan_pipeline(graph, cluster, Pipelining(stages, 4, "1f1b", cuts=("blocks.1",)), options)
    return plan_graph(graph, cluster, options)


def train(rank: int, path: str, plan: Plan) -> None:
    """Worker: steps of a parallelized model under ``--profile``."""
    built = resolve("gpt:small", batch=8, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROFILE_VARIABLE, path)
        model = parallelize(built.model, plan, graph=plan.graph())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(WARM_STEPS + 2):
        model(*built.args, **built.kwargs).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def pipeline_recorded(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[PlanStep, Path]:
    """Two stages of two processes, every rank recorded."""
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    plan = planned_for_four(stages=2)
    pool.run(train, str(path), plan)
    return PlanStep.of(plan, plan.graph()), path


def test_every_rank_of_a_pipeline_is_laid_over_its_stage(pipeline_recorded: tuple[PlanStep, Path]) -> None:
    piped, path = pipeline_recorded
    traces = read_traces(path)
    assert [trace.rank for trace in traces] == [0, 1, 2, 3]
    measured = compare(piped, traces)
    orders = piped.timeline.timing.schedule.orders
    for rank in measured.ranks:
        assert rank.group == rank.rank // 2
        assert [action for action, *_ in rank.passes] == list(orders[rank.group])
        ends = [0.0, *(end for *_, end in rank.passes)]
        assert all(before <= start < end for before, (_, start, end) in zip(ends, rank.passes, strict=False))
        assert rank.matched > 0.95 * rank.events
        assert 0.0 < rank.busy < measured.seconds and rank.end <= measured.seconds
    # The first stage's first pass comes before the second stage's, and its last backward pass after: one clock for all.
    first, last = measured.ranks[0].passes, measured.ranks[2].passes
    assert first[0][1] < last[0][1] and last[-1][1] < first[-1][2]
    linear = sum(op.target == "aten.linear.default" for op in piped.graph.ops)
    rows = [row for row in measured.rows if row.where.startswith(("0 ", "2 ")) and row.what == "linear"]
    assert sum(row.count for row in rows if row.phase == "forward") == 4 * linear  # of four micro-batches
    assert sum(row.count for row in rows if row.phase == "backward") == 2 * 4 * linear  # of inputs and of weights
    assert any(row.what == "all-gather" for row in measured.rows)
    sizes = [abs(row.difference) for row in measured.rows]
    assert sizes == sorted(sizes, reverse=True) and all(row.measured > 0 for row in measured.rows)
    said = measured_html(piped, compare(piped, traces[:3]))
    assert "on 3 of 4 ranks" in said and "The traces of 1 ranks are not" in said


def test_the_page_of_a_pipeline_shows_what_was_measured(pipeline_recorded: tuple[PlanStep, Path], opened: Any) -> None:
    piped, path = pipeline_recorded
    view = opened(plan_page(piped.plan, piped.graph, why_seconds=0, traces=read_traces(path)), 820, "dark")
    titles = view.page.evaluate("shardwright.timeline.groups.map((g) => g.title)")
    assert [title.split(",")[0].split(":")[0] for title in titles] == ["predicted", "measured", "predicted", "measured"]
    bars = view.page.evaluate("shardwright.timeline.groups[1].rows.map((r) => r.ids.length)")
    assert bars == [8 + 2] * 4  # every pass, the sums that follow, the update
    view.page.select_option("#timeline select.group", "1")
    assert "rank 2" in view.page.evaluate("shardwright.timeline.groups[3].title")
    assert "Predicted beside measured" in view.page.inner_text("#timeline")
    assert view.said == [] and axe_violations(view.page) == []


def test_traces_of_something_else_are_refused(pipeline_recorded: tuple[PlanStep, Path], recorded: Path) -> None:
    piped, path = pipeline_recorded
    with pytest.raises(ShardwrightError, match="holds no passes"):
        compare(piped, read_traces(recorded))
    with pytest.raises(ShardwrightError, match="not those of the plan"):
        compare(piped, [read_trace(trace_path(path, 2), rank=0)])


def test_a_parallelized_module_is_matched_by_its_instructions(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    plan = planned_for_four(stages=0)
    pool.run(train, str(path), plan)
    (trace,) = read_traces(path)
    step = PlanStep.of(plan, plan.graph())
    measured = compare(step, [trace])
    (rank,) = measured.ranks
    assert rank.matched > 0.95 * rank.events and 0.0 < rank.busy <= measured.seconds
    assert "on 1 of 4 ranks" in measured_html(step, measured)
    found = {(row.phase, row.what) for row in measured.rows}
    assert {("forward", "linear"), ("backward", "linear"), ("parameters", "all-gather")} <= found
    # Passes of the compiler's that trace backward functions are in none of the steps that are recorded.
    assert not any("Fake" in e["name"] or "make_fx" in e["name"] for e in trace.events)
    assert measured.seconds < 2.0
