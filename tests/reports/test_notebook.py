"""A plan shows itself in a notebook: a frame with the glance, in plain HTML."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.reports.conftest import Planned

from shardwright.units import seconds_text


def test_a_plan_shows_itself(gpt: Planned, browser: Any) -> None:
    page = browser.new_page()
    page.set_content(gpt.plan._repr_html_())
    frame = page.frame_locator("iframe")
    said = frame.locator("main").inner_text()
    assert seconds_text(gpt.plan.prediction.step_seconds) in said and "megatron" in said and "tokens a second" in said
    inside = frame.locator("html").evaluate("(html) => [html.scrollHeight, innerHeight]")
    assert inside[0] <= inside[1] + 120  # hardly anything to scroll
    page.close()


def test_a_plan_without_its_graph_shows_itself_too(gpt: Planned) -> None:
    html = replace(gpt.plan, captured=None)._repr_html_()
    assert "one step" in html and "tokens a second" not in html
    assert replace(gpt.plan, model="<script>alert(1)</script>")._repr_html_().count("<script") == 0
