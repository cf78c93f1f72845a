"""How large the page of a plan is, how soon it paints and how smoothly it moves: ``python -m bench.page [PLAN.json …]``.

In headless Chromium, for a GPT on 8 devices, a Llama of 70 billion parameters on 64 as one mesh and as a pipeline, a CNN,
and 160 layers on 512 devices, both ways (planned here unless files are named; ``--save FOLDER`` keeps the plans): bytes of
the file, first contentful paint and readiness (median of five loads), and of 120 frames of zooming and of scrolling each
the time between frames (median, 95th percentile, worst) and the processor time that the page's main thread takes for one
(Chrome's thread clock, which other work on the machine does not disturb). ``--pictures FOLDER`` takes pictures.
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
from shardwright.planner import Options, Pipelining, plan_graph, plan_pipeline
from shardwright.plans import Plan
from shardwright.reports import plan_page
from shardwright.zoo.reference import resolve

LLAMA = "llama:layers={},width=8192,heads=64,kv_heads=8,inner=28672"
CASES: dict[str, tuple[Any, ...]] = {
    "gpt": ("gpt:layers=24,width=2048,heads=16", "8xH200", 16, None),
    "cnn": ("wresnet50:width=4", "8xH200", 128, None),
    "llama70": (LLAMA.format(80), "8x8xH100", 128, 4096),
    "llama70_pipeline": (LLAMA.format(80), "8x8xH100", 128, 4096, Pipelining(8, 64, "1f1b")),
    "llama160": (LLAMA.format(160), "64x8xH100", 512, 4096),
    "llama160_pipeline": (LLAMA.format(160), "64x8xH100", 512, 4096, Pipelining(16, 64, "1f1b")),
}
SHOTS = {
    "gpt": ((1280, "light"), (820, "dark"), (390, "dark")),
    "llama70_pipeline": ((1280, "dark"), (820, "light"), (390, "light")),
    "cnn": ((1280, "light"), (820, "dark"), (390, "light")),
}
LOADS, FRAMES = 5, 120

ZOOM = """async (frames) => {
  const gaps = [], { view } = window.shardwright, frame = () => new Promise(requestAnimationFrame);
  document.getElementById("timeline").scrollIntoView({ behavior: "instant" });
  await frame();
  let before = await frame();
  for (let i = 0; i < frames; i += 1) {
    view.zoom(i < frames / 2 ? 1.12 : 1 / 1.12, view.whole * 0.4);
    const now = await frame();
    gaps.push(now - before); before = now;
  }
  return gaps;
}"""
SCROLL = """async (frames) => {
  const gaps = [], frame = () => new Promise(requestAnimationFrame);
  document.documentElement.style.scrollBehavior = "auto";
  scrollTo(0, 0);
  await frame();
  let before = await frame();
  for (let i = 0; i < frames; i += 1) { scrollBy(0, 60); const now = await frame(); gaps.push(now - before); before = now; }
  return gaps;
}"""


def planned(
    reference: str, cluster: str, batch: int, seq: int | None, stages: Pipelining | None = None
) -> tuple[Plan, Graph]:
    resolved = resolve(reference, batch=batch, seq=seq, dtype="bfloat16")
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    if stages is None:
        plan = plan_graph(graph, parse_cluster(cluster), reference=reference)
    else:
        options = Options(search="megatron", recompute="blocks")
        plan = plan_pipeline(graph, parse_cluster(cluster), stages, options, reference=reference)
    return replace(plan, batch=batch, sequence=seq, dtype="bfloat16"), graph


def measured(browser: Any, path: Path) -> list[str]:
    """First paint and readiness; frames of zooming and of scrolling. All in milliseconds."""
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
    page.wait_for_timeout(1500)  # what the page does when nobody has asked yet
    clock = page.context.new_cdp_session(page)
    clock.send("Performance.enable", {"timeDomain": "threadTicks"})
    told = [f"{statistics.median(paints):.0f}", f"{statistics.median(ready):.0f}"]
    for motion in (ZOOM, SCROLL):
        before = _worked(clock)
        gaps = sorted(page.evaluate(motion, FRAMES))
        each = 1e3 * (_worked(clock) - before) / FRAMES
        told += [f"{gaps[FRAMES // 2]:.0f} / {gaps[int(0.95 * FRAMES)]:.0f} / {gaps[-1]:.0f}", f"{each:.1f}"]
    page.close()
    return told


def _worked(clock: Any) -> float:
    """Seconds of processor time that the page's main thread has taken so far."""
    found = clock.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in found if metric["name"] == "TaskDuration"))


def pictures(browser: Any, name: str, path: Path, folder: Path) -> None:
    for width, theme in SHOTS.get(name, ()):
        page = browser.new_page(viewport={"width": width, "height": 1500}, color_scheme=theme)
        page.goto(f"file://{path}")
        page.wait_for_selector("html[data-ready]")
        if not page.evaluate("Boolean(shardwright.data.pipeline)"):
            page.evaluate("shardwright.view.zoom(12, shardwright.view.whole * 0.37)")
        page.wait_for_timeout(600)
        path_of = str(folder / f"page_{name}_{width}_{theme}.jpg")
        page.screenshot(path=path_of, full_page=True, type="jpeg", quality=60)
        page.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plans", nargs="*", type=Path, help="plan files instead of the cases")
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--save", type=Path, help="folder to keep the plans in")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), help="which of the cases")
    asked = parser.parse_args()
    columns = [
        "plan",
        "events",
        "file kB",
        "first paint ms",
        "ready ms",
        "between frames of a zoom ms (median / 95 % / worst)",
        "main thread per frame ms",
        "between frames of scrolling ms",
        "main thread per frame ms",
    ]
    print(f"| {' | '.join(columns)} |\n|---|{'--:|' * (len(columns) - 1)}")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=asked.browser, args=["--no-sandbox"])
        for name in [str(path) for path in asked.plans] or asked.cases:
            if asked.plans:
                plan = Plan.load(name)
                graph, name = plan.graph(), Path(name).stem
            else:
                plan, graph = planned(*CASES[name])
            if asked.save is not None:
                plan.save(asked.save / f"{name}.json")
            path = Path(folder) / f"{name}.html"
            path.write_text(plan_page(plan, graph, file=f"{name}.json", price=3.0, why_seconds=10.0), encoding="utf-8")
            stages = f", {len(plan.stages)} stages, {plan.microbatches} micro-batches" if len(plan.stages) > 1 else ""
            cells = [f"{plan.model} on {plan.cluster.name}, {len(graph.ops)} operators{stages}"]
            cells += [str(plan_events(plan, graph)), f"{path.stat().st_size / 1e3:.0f}", *measured(browser, path)]
            print(f"| {' | '.join(cells)} |", flush=True)
            if asked.pictures is not None:
                pictures(browser, name, path, asked.pictures)
        browser.close()


def plan_events(plan: Plan, graph: Graph) -> int:
    """Events of one rank of every kind."""
    from shardwright.simulator import simulate_plan

    return sum(len(rank.events) for rank in simulate_plan(plan, graph).ranks)


if __name__ == "__main__":
    main()
