"""The page in a real browser: every section is there without a complaint, and its numbers are those of the commands."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.reports.conftest import Planned, axe_violations, number, set_factors, until

from shardwright.cli import main
from shardwright.cli._step import step_document
from shardwright.reports.page import SECTIONS, plan_page
from shardwright.reports.steps import PlanStep
from shardwright.simulator import WhatIf, simulate_plan

SETTINGS = [
    {},
    {"gpu": 0.5},
    {"gpu": 3.7},
    {"node": 0.1},
    {"node": 8.0, "gpu": 0.25},
    {"device": 1.2},
    {"device": 0.35, "gpu": 2.0},
    {"host": 0.2},
    {"host": 6.0, "device": 2.5},
    {"node": 0.02, "gpu": 0.05, "device": 5.0, "host": 4.0},
    {"device": 50.0, "host": 50.0, "gpu": 50.0, "node": 50.0},
    {"host": 0.9, "device": 1.1, "gpu": 1.3, "node": 0.7},
]


@pytest.fixture(scope="module")
def text(gpt: Planned) -> str:
    return plan_page(gpt.plan, gpt.graph, price=2.0, why_seconds=5.0)


def test_the_page_needs_nothing_from_anywhere(text: str) -> None:
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")  # the name of a namespace, fetched by nobody
    assert "https://" not in text and "src=" not in text and "@import" not in text
    assert len(text.encode()) < 300_000


def test_every_section_renders_without_a_complaint(text: str, opened: Any) -> None:
    for width, theme in ((1280, "light"), (820, "dark"), (360, "light")):
        view = opened(text, width, theme)
        for section, title in SECTIONS.items():
            assert view.page.locator(f"#{section} h2").inner_text() == title
            assert view.page.locator(f"#{section}").bounding_box()["height"] > 80
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width  # no sideways scrolling
        painted = view.page.evaluate(
            """() => [...document.querySelectorAll('canvas')].map((canvas) => {
                 const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
                 return new Set(new Uint32Array(pixels.buffer)).size; })"""
        )
        assert len(painted) == 4 and min(painted) >= 4, painted  # overview, timeline, memory, matrix: none is empty
        assert view.said == []


def test_the_search_box_filters(text: str, opened: Any, gpt: Planned) -> None:
    page = opened(text).page
    everything = page.locator("#split .row").count()
    page.fill("#split input[type=search]", "attention query")
    shown = page.locator("#split .row")
    assert 0 < shown.count() < everything
    for i in range(shown.count()):
        modules = shown.nth(i).evaluate(
            "(row) => { const names = [], up = (at) => at.closest('details'); "
            "for (let at = up(row); at; at = up(at.parentElement)) "
            "names.unshift(at.querySelector('summary .module').textContent); return names.join('.'); }"
        )
        assert "query" in modules, modules
    page.fill("#split input[type=search]", "there is no such thing")
    assert shown.count() == 0
    page.fill("#split input[type=search]", "")
    assert shown.count() == everything


def test_a_picked_parameter_shows_who_holds_what(opened: Any) -> None:
    from tests.reports.conftest import planned

    found = planned("gpt:small", "4xH100", search="fsdp", baselines=(), fewer_devices=False)
    page = opened(plan_page(found.plan, found.graph, why_seconds=0)).page
    cut = page.locator("#split .row.parameter", has_text="dim 0 cut").first
    cut.click()
    ranks = page.locator("#split .drawing text.ranks").all_text_contents()
    assert ranks == ["0", "1", "2", "3"]


def test_zoom_and_keys_work(text: str, opened: Any) -> None:
    page = opened(text).page
    whole = page.evaluate("shardwright.view.to - shardwright.view.from")
    page.click("#timeline .zoom-in")
    assert page.evaluate("shardwright.view.to - shardwright.view.from") == pytest.approx(whole / 2)
    page.click("#timeline .zoom-all")
    bars = page.locator("#timeline canvas.bars")
    bars.scroll_into_view_if_needed()
    box = bars.bounding_box()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 40)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -400)
    page.keyboard.up("Control")
    until(page, f"shardwright.view.to - shardwright.view.from < {0.5 * whole}")
    before = page.evaluate("shardwright.view.from")
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40, steps=4)
    page.mouse.up()
    assert page.evaluate("shardwright.view.from") > before
    bars.focus()
    page.keyboard.press("0")
    assert page.evaluate("shardwright.view.to - shardwright.view.from") == pytest.approx(whole)
    page.keyboard.press("ArrowRight")
    first = page.inner_text("#timeline .said")
    page.keyboard.press("ArrowRight")
    second = page.inner_text("#timeline .said")
    assert first and second and first != second
    page.keyboard.press("ArrowDown")
    assert "over" in page.inner_text("#timeline .said")  # a collective, and the link it goes over


def test_pointing_at_a_bar_tells_what_it_is_and_what_it_waits_for(text: str, opened: Any) -> None:
    page = opened(text).page
    bars = page.locator("#timeline canvas.bars")
    bars.scroll_into_view_if_needed()
    box = bars.bounding_box()
    said = ""
    for share in (0.3, 0.35, 0.4, 0.5, 0.6):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 24 + 13)
        if page.locator(".tip").count() and page.locator(".tip").is_visible():
            said = page.inner_text(".tip")
            break
    assert "of" in said and ("starts" in said or "waits for" in said), said


@pytest.mark.parametrize("which", ["gpt", "on_processors"])
def test_sliders_give_the_numbers_of_the_command(which: str, request: pytest.FixtureRequest, opened: Any) -> None:
    found: Planned = request.getfixturevalue(which)
    plan, graph = found.plan, found.graph
    page = opened(plan_page(plan, graph, why_seconds=0)).page
    axes = [axis.name for axis in plan.meshes[0].axes]
    seen = set()
    tried = [{k: v for k, v in s.items() if k in (*axes, "device", "host")} for s in SETTINGS]
    if which == "on_processors":
        tried += [{"cpu": 0.3}, {"cpu": 4.0, "device": 0.6}]
    for setting in tried:
        rates = {axis: factor for axis, factor in setting.items() if axis in axes}
        what_if = WhatIf(rates, setting.get("device", 1.0), setting.get("host", 1.0))
        said = step_document(PlanStep(plan, graph, simulate_plan(plan, graph, what_if=what_if)))
        set_factors(page, setting)
        for name in ("step_seconds", "sum_seconds", "exposed_seconds", "lower_bound_seconds"):
            assert math.isclose(number(page, "what-if", name), said[name], rel_tol=1e-9, abs_tol=1e-15), (setting, name)
        for stream, busy in said["ranks"][0]["busy_seconds"].items():
            assert math.isclose(number(page, "what-if", f"busy 0 {stream}"), busy, rel_tol=1e-9), (setting, stream)
        until(page, "shardwright.memory.storages.run.total === shardwright.timeline.groups[0].run.total")
        curve = page.evaluate("(() => { const c = shardwright.memory.curve; return [c.times, c.total]; })()")
        use = simulate_plan(plan, graph).stage().memory
        assert max(curve[1]) == max(use.curve)
        seen.add(said["step_seconds"])
    assert len(seen) >= 6  # the settings matter


def test_the_command_that_the_page_shows_gives_the_page_s_numbers(
    text: str,
    opened: Any,
    gpt: Planned,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = opened(text).page
    gpt.plan.save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    for setting in ({}, {"gpu": 0.5, "node": 2.0, "device": 1.2, "host": 0.5}):
        set_factors(page, setting)
        words = page.inner_text("#what-if .command").split()
        monkeypatch.setattr(sys, "argv", [*words, "--json"])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code
        said = json.loads(capsys.readouterr().out)
        assert math.isclose(number(page, "what-if", "step_seconds"), said["step_seconds"], rel_tol=1e-9)
        if not setting:
            assert number(page, "glance", "step_seconds") == pytest.approx(said["step_seconds"], rel=1e-9)
            assert number(page, "memory", "peak_bytes") == said["peak_bytes"]
            for row in said["stages"][0]["communication"]:
                assert number(page, "communication", f"bytes {row['collective']} {row['axis']}") == row["bytes"]


def test_a_what_if_says_that_it_is_one(text: str, opened: Any) -> None:
    page = opened(text).page
    banner = page.locator(".banner")
    assert not banner.is_visible()
    set_factors(page, {"gpu": 0.1})
    assert banner.is_visible()
    banner.locator("button").click()
    until(page, "document.querySelector('.banner').hidden")
    assert number(page, "what-if", "ratio") == 1.0


def test_the_slider_itself_changes_the_numbers(text: str, opened: Any) -> None:
    page = opened(text).page
    before = number(page, "what-if", "step_seconds")
    page.locator("#factor-device-slider").focus()
    for _ in range(30):
        page.keyboard.press("ArrowLeft")
    until(page, f"Number(document.querySelector('#what-if [data-number=step_seconds]').dataset.value) > {before}")


def test_why_names_alternatives_and_the_chosen_one(text: str, opened: Any) -> None:
    page = opened(text).page
    assert page.locator("#why option").count() > 3
    assert page.locator("#why tr.chosen").count() == 1
    assert page.locator("#why tbody tr").count() > 1


def test_no_violation_of_accessibility_rules(text: str, opened: Any) -> None:
    for width, theme in ((1280, "light"), (1280, "dark"), (360, "light")):
        assert axe_violations(opened(text, width, theme).page) == []
