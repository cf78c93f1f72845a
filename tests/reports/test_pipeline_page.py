"""Pages of several passes in a real browser: stages, micro-batches, bubbles, and the numbers of `shardwright simulate`."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.reports.conftest import Planned, axe_violations, captured_small, number, planned, set_factors, until

from shardwright.cli import main
from shardwright.cluster import parse_cluster
from shardwright.planner import Options
from shardwright.planner.pipelines import Pipelining, plan_pipeline
from shardwright.reports.diff import ISSUING, STAGES, compare
from shardwright.reports.diff_page import diff_page
from shardwright.reports.page import SECTIONS, plan_page
from shardwright.reports.page_data import packed_traffic
from shardwright.reports.steps import PlanStep
from shardwright.simulator import WhatIf, simulate_plan

SETTINGS: list[dict[str, float]] = [
    {},
    {"microbatches": 2},
    {"microbatches": 1},
    {"gpu": 0.2},
    {"stages": 0.01},
    {"stages": 0.01, "microbatches": 2},
    {"device": 3.0},
    {"device": 0.5, "microbatches": 2, "gpu": 4.0},
    {"host": 0.3},
    {"host": 5.0, "device": 2.0, "stages": 0.1, "gpu": 0.5, "microbatches": 1},
    {"host": 50.0, "device": 50.0, "gpu": 0.02},
    {"cpu": 0.3, "host": 2.0},
    {"cpu": 0.05, "microbatches": 2},
    {"device": 0.7, "host": 0.7},
    {"stages": 30.0},
    {"stages": 0.3, "host": 2.0, "device": 9.0, "microbatches": 2},
]


def pipelined(cluster: Any, microbatches: int, schedule: str, search: str) -> Planned:
    graph = captured_small()
    asked = Pipelining(2, microbatches, schedule, cuts=("blocks.1",))  # not by the prices of whatever machine this is
    plan = plan_pipeline(graph, cluster, asked, Options(search=search, fewer_devices=False), reference="gpt:small")
    return Planned(replace(plan, batch=8), graph)


@pytest.fixture(scope="module")
def piped() -> Planned:
    """Two stages of two devices; backward passes in two halves."""
    return pipelined(parse_cluster("4xH100"), 4, "zb-h1", "fsdp")


@pytest.fixture(scope="module")
def unequal() -> Planned:
    """Micro-batches of 3, 3 and 2 rows on stages of one device each."""
    return pipelined(parse_cluster("2xH100"), 3, "1f1b", "auto")


@pytest.fixture(scope="module")
def on_processors() -> Planned:
    """Stages of two processors that send for themselves."""
    cluster = parse_cluster("local:2")
    link = replace(cluster.network, processor_share=0.4, processor_seconds=40e-6)
    node = replace(cluster.nodes[0], devices=4, link=link)
    return pipelined(replace(cluster, nodes=(node,), network=link), 4, "1f1b", "fsdp")


@pytest.fixture(scope="module")
def accumulating() -> Planned:
    """One mesh that takes the batch in four micro-batches."""
    graph, asked = captured_small(), Pipelining(1, 4, "1f1b")
    options = Options(search="fsdp", fewer_devices=False)
    plan = plan_pipeline(graph, parse_cluster("2xH100"), asked, options, reference="gpt:small")
    return Planned(replace(plan, batch=8), graph)


@pytest.fixture(scope="module")
def flat() -> Planned:
    """One mesh that takes the batch in one go."""
    return planned("gpt:small", "2xH100", search="fsdp", baselines=(), fewer_devices=False)


@pytest.fixture(scope="module")
def text(piped: Planned) -> str:
    return plan_page(piped.plan, piped.graph, price=2.0, why_seconds=10.0)


def test_every_section_shows_stages_without_a_complaint(text: str, opened: Any) -> None:
    assert "https://" not in text and len(text.encode()) < 400_000
    for width, theme in ((1280, "light"), (820, "dark"), (360, "light")):
        view = opened(text, width, theme)
        for section, title in SECTIONS.items():
            assert view.page.locator(f"#{section} h2").inner_text() == title
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width
        painted = view.page.evaluate(
            """() => [...document.querySelectorAll('canvas')].map((canvas) => {
                 const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
                 return new Set(new Uint32Array(pixels.buffer)).size; })"""
        )
        assert len(painted) == 4 and min(painted) >= 4, painted
        assert view.said == []
        assert number(view.page, "glance", "cost") == pytest.approx(number(view.page, "what-if", "cost"), rel=1e-9)
        assert number(view.page, "glance", "step_seconds") == number(view.page, "what-if", "step_seconds")
        assert axe_violations(view.page) == []


def test_the_timeline_has_every_pass_and_every_bubble(text: str, opened: Any, piped: Planned) -> None:
    page = opened(text).page
    timing = simulate_plan(piped.plan, piped.graph).timing
    for device, order in enumerate(timing.schedule.orders):
        mine = f"shardwright.timeline.groups[0].rows[{device}].ids"
        group = "shardwright.timeline.groups[0]"
        bars = page.evaluate(f"{mine}.map((i) => [{group}.act(i), {group}.start(i), {group}.end(i)])")
        passes = [bar for bar in bars if bar[0] in ("forward", "backward", "weights")]
        assert len(passes) == len(order)
        for (_, start, end), begun, done in zip(passes, timing.starts[device], timing.ends[device], strict=True):
            assert math.isclose(start, begun, rel_tol=1e-9, abs_tol=1e-15) and math.isclose(end, done, rel_tol=1e-9)
        ends = [0.0, *(end for _, _, end in bars)]
        assert all(math.isclose(a, b[1], rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(ends, bars, strict=False))
        assert any(bar[0] == "bubble" for bar in bars)  # and together they leave nothing out
    before = page.evaluate("shardwright.timeline.groups[1].title")
    page.select_option("#timeline select.group", "1")
    assert page.evaluate("shardwright.timeline.groups[1].title") != before
    assert page.input_value("#memory select.group") == "1"  # memory follows
    bars = page.locator("#timeline canvas.bars")
    bars.scroll_into_view_if_needed()
    bars.focus()
    said = set()
    for _ in range(12):
        page.keyboard.press("ArrowRight")
        said.add(page.inner_text("#timeline .said"))
    assert any("micro-batch" in line for line in said) and any("waits" in line or "starts" in line for line in said)


@pytest.mark.parametrize("which", ["piped", "unequal", "on_processors", "accumulating", "flat"])
def test_sliders_give_the_numbers_of_the_command(which: str, request: pytest.FixtureRequest, opened: Any) -> None:
    found: Planned = request.getfixturevalue(which)
    plan, graph = found.plan, found.graph
    page = opened(plan_page(plan, graph, why_seconds=10.0)).page
    names = page.evaluate("shardwright.data.step.links")
    counts = page.evaluate("shardwright.data.step.variants.map((v) => v.microbatches)")
    assert plan.microbatches in counts and {1, 2} <= set(counts)
    seen, tried = set(), 0
    for setting in SETTINGS:
        if any(name not in (*names, "device", "host", "microbatches") for name in setting):
            continue
        rates = {name: factor for name, factor in setting.items() if name in names}
        count = int(setting.get("microbatches", plan.microbatches))
        asked = WhatIf(rates, setting.get("device", 1.0), setting.get("host", 1.0))
        said = simulate_plan(plan, graph, what_if=asked, microbatches=count)
        set_factors(page, {name: factor for name, factor in setting.items() if name != "microbatches"})
        page.fill("#factor-microbatches", str(counts.index(count)))
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        told = {
            "step_seconds": said.seconds,
            "exposed_seconds": said.exposed_seconds,
            "sum_seconds": said.sum_seconds,
            "lower_bound_seconds": max(rank.lower_bound for rank in said.ranks),
            "peak_bytes": said.peak_bytes,
        }
        if len(plan.stages) > 1:
            told |= {"bubble": said.bubble, "makespan": said.timing.makespan, "sent_bytes": said.sent_bytes}
            told |= {f"busy stage {n}": stage.busy_seconds for n, stage in enumerate(said.stages)}
        for name, value in told.items():
            shown = number(page, "what-if", name)
            assert math.isclose(shown, value, rel_tol=1e-9, abs_tol=1e-12), (setting, name, shown, value)
        run = page.evaluate("shardwright.whatIf.simulate().told.map((s) => [s.bubble, s.exposed, s.memory])")
        for shown, stage in zip(run, said.stages, strict=True):
            pairs = zip(shown, (stage.bubble, stage.exposed_seconds, stage.memory_bytes), strict=True)
            assert all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in pairs), setting
        seen.add(said.seconds)
        tried += 1
    assert tried >= 9 and len(seen) >= 7  # the settings matter


def test_the_command_that_the_page_shows_gives_the_page_s_numbers(
    text: str,
    opened: Any,
    piped: Planned,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = opened(text).page
    piped.plan.save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    counts = page.evaluate("shardwright.data.step.variants.map((v) => v.microbatches)")
    page.fill("#factor-microbatches", str(counts.index(2)))
    page.fill("#factor-link-stages", "0.05")
    for word in ("--microbatches 2", "stages=0.05"):
        until(page, f"document.querySelector('#what-if .command').textContent.includes('{word}')")
    monkeypatch.setattr(sys, "argv", [*page.inner_text("#what-if .command").split(), "--json"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["microbatches"] == 2
    assert math.isclose(number(page, "what-if", "step_seconds"), said["step_seconds"], rel_tol=1e-9)
    assert math.isclose(number(page, "what-if", "peak_bytes"), said["peak_bytes"], rel_tol=1e-9)
    assert page.locator(".banner").is_visible()


def test_memory_over_time_is_about_what_is_predicted(opened: Any, on_processors: Planned) -> None:
    page = opened(plan_page(on_processors.plan, on_processors.graph, why_seconds=0)).page
    timeline = simulate_plan(on_processors.plan, on_processors.graph)
    for device in range(2):
        page.select_option("#memory select.group", str(device))
        most = page.evaluate("Math.max(...shardwright.memory.curve.total)")
        held = timeline.times[device, timeline.pipeline.micro.sizes[0]].bytes
        assert held.resting + held.kept < most
        assert most == pytest.approx(timeline.memory[device], rel=0.1)
        assert number(page, "memory", f"peak_bytes {device}") == timeline.memory[device]


def test_the_matrix_holds_what_stages_send(text: str, opened: Any, piped: Planned) -> None:
    page, looked = opened(text).page, PlanStep.of(piped.plan, piped.graph)
    assert packed_traffic(looked)["ranks"] == 4
    assert number(page, "communication", "sent 0 1") == sum(size for (a, _), size in looked.parcels.items() if a < 2)
    page.locator("#communication canvas").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert "between stages" in page.inner_text("#communication .said")


def test_two_plans_of_which_one_has_stages(piped: Planned, opened: Any) -> None:
    flat = planned("gpt:small", "4xH100", search="fsdp", baselines=(), fewer_devices=False)
    found = compare(flat.plan, piped.plan, flat.graph)
    assert found.steps[1].timeline.seconds == pytest.approx(simulate_plan(piped.plan, piped.graph).seconds, rel=1e-12)
    assert sum(d.difference for d in found.decisions) == pytest.approx(found.seconds, rel=1e-6)
    bubbles = next(d for d in found.decisions if d.what == STAGES)
    assert bubbles.differs and bubbles.second_cost.idle > 0 and "2 stages" in bubbles.second
    assert bubbles.parts[f"{ISSUING} again"] > 0  # three of four micro-batches
    view = opened(diff_page(found, ("flat", "piped")))
    assert view.said == []
    assert view.page.evaluate("shardwright.timeline.groups[1].rows.length") == 2
    assert math.isclose(view.page.evaluate("shardwright.runs[1].total"), found.steps[1].timeline.seconds, rel_tol=1e-9)
