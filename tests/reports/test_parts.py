"""The parts of a page that need no browser: what-ifs, packing, traffic, trust."""

from __future__ import annotations

import base64
import gzip
import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from tests.reports.conftest import Planned, planned

from shardwright.errors import ShardwrightError
from shardwright.reports.page_data import deflated, packed_step
from shardwright.reports.steps import PlanStep
from shardwright.reports.traffic import matrix
from shardwright.reports.trust import published, read_verification
from shardwright.simulator import WhatIf, simulate
from shardwright.simulator.what_if import link_names, parts, scaled

ROOT = Path(__file__).resolve().parents[2]


def test_the_parts_of_every_event_add_up_to_it(gpt: Planned) -> None:
    step = PlanStep.of(gpt.plan, gpt.graph).steps[0]
    assert any(event.collective for event in step.stage.events)
    for event in step.stage.events:
        part = parts(event, gpt.plan.meshes[0])
        assert min(part.latency, part.wire, part.local) >= 0.0
        assert part.latency + part.wire + part.local == pytest.approx(event.seconds, rel=1e-12, abs=1e-18)
        assert (part.wire > 0) == bool(event.collective)


def test_a_what_if_does_to_seconds_what_it_says(gpt: Planned) -> None:
    plan, graph = gpt.plan, gpt.graph
    as_it_is = simulate(graph, plan.stages[0].strategy, plan.meshes[0], graph.training, plan.optimizer)
    mesh, axis = plan.meshes[0], plan.meshes[0].axes[-1].name
    slower = scaled(as_it_is.ranks[0].events, mesh, WhatIf({axis: 0.5}))
    for before, after in zip(as_it_is.ranks[0].events, slower, strict=True):
        wire = parts(before, mesh).wire if before.stream == axis else 0.0
        assert after.seconds == pytest.approx(before.seconds + wire, rel=1e-12)
    twice = simulate(graph, plan.stages[0].strategy, mesh, graph.training, plan.optimizer, what_if=WhatIf({}, 2.0, 2.0))
    assert twice.ranks[0].load["compute"] == pytest.approx(as_it_is.ranks[0].load["compute"] / 2)
    assert twice.seconds < as_it_is.seconds
    assert twice.peak_bytes == as_it_is.peak_bytes


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_without_meaning_are_refused(bad: float, gpt: Planned) -> None:
    with pytest.raises(ShardwrightError, match="has no meaning"):
        WhatIf({"gpu": bad})
    with pytest.raises(ShardwrightError, match="no link 'rack'"):
        WhatIf({"rack": 2.0}).check(link_names(gpt.plan))


def test_what_is_packed_comes_back(gpt: Planned) -> None:
    step = PlanStep.of(gpt.plan, gpt.graph).steps[0]
    document = json.loads(gzip.decompress(base64.b64decode(deflated(packed_step(step)))))
    known = {"words": 0, "numbers": 0}

    def column(table: str, codes: list[int]) -> list[Any]:
        found = []
        for back in codes:
            known[table] += back == 0
            found.append(document[table][known[table] - (back or 1)])
        return found

    words = {
        name: column("words", document[name]) for name in ("kind", "phase", "name", "module", "collective", "carries")
    }
    numbers = {name: column("numbers", document[name]) for name in ("bytes", "latency", "wire", "local", "host")}
    assert words["module"] == [event.module for event in step.stage.events]
    for place, event in enumerate(step.stage.events):
        seconds = sum(numbers[part][place] for part in ("latency", "wire", "local"))
        assert seconds == pytest.approx(event.seconds, rel=1e-12)
        assert words["name"][place] == event.name
        assert tuple(place - distance for distance in document["waits"][place]) == event.after
    assert column("numbers", document["storages"]["bytes"]) == [s.bytes for s in step.stage.memory.storages]
    assert list(accumulate(document["storages"]["born"])) == [s.born for s in step.stage.memory.storages]


def test_deeper_models_take_little_more_room() -> None:
    asked: dict[str, Any] = {"search": "fsdp", "baselines": (), "recompute": "none", "fewer_devices": False}
    few, many = (
        len(deflated(packed_step(PlanStep.of(found.plan, found.graph).steps[0])))
        for found in (planned(f"gpt:layers={n},width=64,heads=4,vocab=100", "4xH100", **asked) for n in (4, 16))
    )
    assert many < 2.8 * few  # a further layer takes less than half of what one takes by itself
    assert (many - few) / 12 < 1150  # bytes a layer, so 160 of them are far below 2 MB


def test_what_is_sent_is_what_the_collectives_send(gpt: Planned) -> None:
    mesh = gpt.plan.meshes[0]
    step = PlanStep.of(gpt.plan, gpt.graph)
    sent = matrix(step.flows(0), mesh)
    total = 0.0
    for (kind, axis), (_, size, _) in step.communication(0).items():
        p = dict(mesh.names)[axis]
        total += mesh.devices * {"all_reduce": 2.0}.get(kind, 1.0) * (p - 1) / p * size
    assert sum(sent.values()) == pytest.approx(total)
    for source, target in sent:
        a, b = mesh.coordinates(source), mesh.coordinates(target)
        assert sum(x != y for x, y in zip(a, b, strict=True)) == 1  # along one axis at a time


def test_the_published_errors_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs" / "benchmarks" / "accuracy.md").read_text()
    said = [
        (float(a), float(b))
        for a, b in re.findall(r"Step time: median absolute error ([\d.]+) %, worst ([\d.]+) %", text)
    ]
    memory = re.findall(r"Peak memory: median ([\d.]+) %, worst ([\d.]+) %", text)
    rows = published("measured 2026-11-15 and 17 on NVIDIA H200 with torch 2.11.0+cu130")
    assert [(row["median"], row["worst"]) for row in rows[:2]] == said[:2]
    assert (rows[2]["median"], rows[2]["worst"]) == tuple(map(float, memory[0]))


def test_a_verification_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "verified.json"
    path.write_text('{"agrees": true, "model": "gpt:small"}')
    assert read_verification(path)["agrees"] is True
    path.write_text("[]")
    with pytest.raises(ShardwrightError, match="is not what"):
        read_verification(path)
    with pytest.raises(ShardwrightError, match="Cannot read"):
        read_verification(tmp_path / "missing.json")
