"""The picture of a plan is well-formed SVG that shows every candidate and every mesh axis."""

from __future__ import annotations

from xml.etree import ElementTree

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import describe_graph, plan_graph
from shardwright.reports import picture
from shardwright.zoo.reference import resolve


def test_every_candidate_and_axis_is_drawn() -> None:
    resolved = resolve("gpt:small", batch=8)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    plan = plan_graph(graph, parse_cluster("2x2xH100"))
    described = describe_graph(graph)
    root = ElementTree.fromstring(picture(plan, graph, dict(described.rules), described.labels))
    words = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"found", "data-parallel", "fsdp", "megatron"} <= words
    assert {f"{name} × {size}" for name, size in plan.strategy.axes} <= words
