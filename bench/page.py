"""How large the page of a plan is, how soon it paints and how smoothly it moves: ``python -m bench.page [PLAN.json …]``.

In headless Chromium, for a GPT on 8 devices, a Llama of 70 billion parameters on 64, a CNN, and 160 layers on 512 devices
(planned here unless files are named): bytes of the file, first contentful paint and readiness (median of five loads), what
drawing one frame costs while zooming, the longest frame while zooming and scrolling. ``--pictures FOLDER`` takes pictures.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import plan_graph
from shardwright.plans import Plan
from shardwright.reports import plan_page
from shardwright.zoo.reference import resolve

LLAMA = "llama:layers={},width=8192,heads=64,kv_heads=8,inner=28672"
CASES = {
    "gpt": ("gpt:layers=24,width=2048,heads=16", "8xH200", 16, None),
    "cnn": ("wresnet50:width=4", "8xH200", 128, None),
    "llama70": (LLAMA.format(80), "8x8xH100", 128, 4096),
    "llama160": (LLAMA.format(160), "64x8xH100", 512, 4096),
}
SHOTS = {
    "gpt": ((1280, "light"), (390, "dark")),
    "llama70": ((1280, "dark"), (820, "light")),
    "cnn": ((1280, "light"),),
}
LOADS = 5

ZOOM = """async () => {
  const gaps = [], draws = [], { view, timeline } = window.shardwright;
  const frame = () => new Promise(requestAnimationFrame);
  let before = await frame();
  for (let i = 0; i < 60; i += 1) {
    view.zoom(i < 30 ? 1.15 : 1 / 1.15, view.whole * 0.4);
    const started = performance.now();
    timeline.draw();
    draws.push(performance.now() - started);
    const now = await frame();
    gaps.push(now - before); before = now;
  }
  return [Math.max(...gaps), draws.sort((a, b) => a - b)[30], Math.max(...draws)];
}"""
SCROLL = """async () => {
  const gaps = [], frame = () => new Promise(requestAnimationFrame);
  document.documentElement.style.scrollBehavior = "auto";
  let before = await frame();
  for (let i = 0; i < 60; i += 1) { scrollBy(0, 80); const now = await frame(); gaps.push(now - before); before = now; }
  gaps.sort((a, b) => a - b);
  return [gaps[30], gaps[59]];
}"""


def planned(reference: str, cluster: str, batch: int, seq: int | None) -> tuple[Plan, Graph]:
    resolved = resolve(reference, batch=batch, seq=seq, dtype="bfloat16")
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    plan = plan_graph(graph, parse_cluster(cluster), reference=reference)
    return replace(plan, batch=batch, sequence=seq, dtype="bfloat16"), graph


def measured(browser: Any, path: Path) -> list[float]:
    """First paint, readiness, longest frame and draw while zooming, frames while scrolling; all in milliseconds."""
    paints, ready = [], []
    page = None
    for _ in range(LOADS):
        if page is not None:
            page.close()
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"file://{path}")
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        ready.append(page.evaluate("performance.now()"))
        paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    assert page is not None
    longest, draw, slowest = page.evaluate(ZOOM)
    usual, worst = page.evaluate(SCROLL)
    page.close()
    return [statistics.median(paints), statistics.median(ready), draw, slowest, longest, usual, worst]


def pictures(browser: Any, name: str, path: Path, folder: Path) -> None:
    for width, theme in SHOTS.get(name, ()):
        page = browser.new_page(viewport={"width": width, "height": 1500}, color_scheme=theme)
        page.goto(f"file://{path}")
        page.wait_for_selector("html[data-ready]")
        page.evaluate("shardwright.view.zoom(12, shardwright.view.whole * 0.37)")
        page.wait_for_timeout(300)
        path_of = str(folder / f"page_{name}_{width}_{theme}.jpg")
        page.screenshot(path=path_of, full_page=True, type="jpeg", quality=70)
        page.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plans", nargs="*", type=Path, help="plan files instead of the four cases")
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    asked = parser.parse_args()
    columns = (
        "plan",
        "events",
        "file kB",
        "first paint ms",
        "ready ms",
        "draw ms (worst)",
        "longest frame of a zoom ms",
    )
    print(f"| {' | '.join((*columns, 'frame of scrolling ms (worst)'))} |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=asked.browser, args=["--no-sandbox"])
        for name in [str(path) for path in asked.plans] or list(CASES):
            if asked.plans:
                plan = Plan.load(name)
                graph, name = plan.graph(), Path(name).stem
            else:
                plan, graph = planned(*CASES[name])
            path = Path(folder) / f"{name}.html"
            path.write_text(plan_page(plan, graph, price=3.0, why_seconds=5.0), encoding="utf-8")
            paint, ready, draw, slowest, longest, usual, worst = measured(browser, path)
            cells = [f"{plan.model} on {plan.cluster.name}, {len(graph.ops)} operators", str(plan_events(plan, graph))]
            cells += [f"{path.stat().st_size / 1e3:.0f}", f"{paint:.0f}", f"{ready:.0f}", f"{draw:.1f} ({slowest:.1f})"]
            cells += [f"{longest:.0f}", f"{usual:.0f} ({worst:.0f})"]
            print(f"| {' | '.join(cells)} |", flush=True)
            if asked.pictures is not None:
                pictures(browser, name, path, asked.pictures)
        browser.close()


def plan_events(plan: Plan, graph: Graph) -> int:
    from shardwright.reports.steps import rank_steps

    return len(rank_steps(plan, graph)[0].events)


if __name__ == "__main__":
    main()
