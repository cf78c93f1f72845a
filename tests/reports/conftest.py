"""What the tests of pages share: small plans, and a real browser where one can be had."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.cluster import Cluster, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import plan_graph
from shardwright.plans import Plan
from shardwright.zoo.reference import resolve

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Planned:
    plan: Plan
    graph: Graph


def captured_small() -> Graph:
    """The small model with a batch of eight."""
    built = resolve("gpt:small", batch=8)
    return capture(built.model, built.args, built.kwargs)


def planned(reference: str, cluster: Cluster | str, batch: int = 8, **options: Any) -> Planned:
    from shardwright.planner import Options

    resolved = resolve(reference, batch=batch)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    target = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    plan = plan_graph(graph, target, Options(**options), reference=reference)
    return Planned(replace(plan, batch=batch), graph)


@pytest.fixture(scope="session")
def gpt() -> Planned:
    return planned("gpt:small", "2x2xH100", fewer_devices=False, one_axis=False)  # a page with two links


@pytest.fixture(scope="session")
def on_processors() -> Planned:
    """Two CPU processes that send for themselves: collectives slow down what is computed meanwhile."""
    cluster = parse_cluster("local:2")
    link = replace(cluster.network, processor_share=0.4, processor_seconds=40e-6)
    nodes = tuple(replace(node, link=link) for node in cluster.nodes)
    return planned("gpt:small", replace(cluster, nodes=nodes, network=link), search="fsdp", fewer_devices=False)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless browser, or a reason why there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (dev extra)")
    found = os.environ.get("SHARDWRIGHT_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium, or name one in SHARDWRIGHT_BROWSER")
    with sync_api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Opened:
    """A page that has unpacked itself, and everything its console said."""

    page: Any
    said: list[str]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Open an HTML text in the browser: ``opened(text, width=…, theme=…)``."""
    pages = []

    def open_page(text: str, width: int = 1280, theme: str = "light") -> Opened:
        path = tmp_path / f"page{len(pages)}.html"
        path.write_text(text, encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme, offline=True)
        page.set_default_timeout(120_000)  # on a machine that others keep busy
        pages.append(page)
        said: list[str] = []
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.goto(f"file://{path}")
        page.wait_for_selector("html[data-ready]", timeout=120_000)
        return Opened(page, said)

    yield open_page
    for page in pages:
        page.close()


def until(page: Any, condition: str) -> None:
    """Wait until an expression holds. (Playwright's own waiting evaluates text in the page, which the page forbids.)"""
    for _ in range(1200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


def number(page: Any, section: str, name: str) -> float:
    found = page.locator(f'#{section} [data-number="{name}"]').first
    return float(found.get_attribute("data-value") or found.get_attribute("value"))


def set_factors(page: Any, setting: dict[str, float]) -> None:
    page.click("#what-if .reset")
    for name, value in setting.items():
        key = name if name in ("device", "host") else f"link-{name}"
        page.fill(f"#factor-{key}", repr(value))
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def axe_violations(page: Any) -> list[Any]:
    """What an automated check of accessibility (axe-core) has against a page."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in found]
