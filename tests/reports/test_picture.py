"""Pictures for papers: well-formed SVG and PDF that show every candidate and axis, with nothing cut off or written over."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.reports.conftest import Planned, planned

from shardwright.plans import Candidate
from shardwright.reports import picture
from shardwright.reports.drawing import Box, Drawing, Words, text_width
from shardwright.reports.picture import LEAST, LEFT, WIDTH


def drawn(found: Planned) -> Drawing:
    return picture(found.plan, found.graph)


def test_every_candidate_and_axis_is_drawn(gpt: Planned) -> None:
    root = ElementTree.fromstring(drawn(gpt).svg())
    words = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"found", "data-parallel", "fsdp", "megatron"} <= words
    assert {f"{name} × {size}" for name, size in gpt.plan.stages[0].strategy.axes} <= words


def test_what_does_not_fit_or_apply_is_there_too(gpt: Planned) -> None:
    plan, p = gpt.plan, gpt.plan.prediction
    large = Candidate("fsdp", plan.stages[0].strategy.axes, replace(p, fits=False))
    none = Candidate(
        "megatron", plan.stages[0].strategy.axes, None, "takes at least 706 GB per device, more than there is. " * 5
    )
    sheet = drawn(Planned(replace(plan, candidates=(*plan.candidates[:1], large, none)), gpt.graph))
    words = [item for item in sheet.items if isinstance(item, Words)]
    assert any("does not fit" in w.text for w in words) and any("no plan: takes" in w.text for w in words)
    assert any(isinstance(item, Box) and item.outline for item in sheet.items)


@pytest.mark.parametrize("which", ["gpt", "inception"])
def test_nothing_is_cut_off_and_no_name_is_written_over_another(which: str, request: pytest.FixtureRequest) -> None:
    if which == "gpt":
        sheet = drawn(request.getfixturevalue("gpt"))
    else:
        asked = {"search": "data-parallel", "baselines": (), "recompute": "none", "fewer_devices": False}
        sheet = drawn(planned("inception:image=75,width=0.25", "4xH100", **asked))
    names = [item for item in sheet.items if isinstance(item, Words) and item.turn]
    assert len(names) > 3
    assert min(b.x - a.x for a, b in pairwise(names)) >= LEAST
    for item in sheet.items:
        if isinstance(item, Box):
            assert item.x >= 0 and item.x + item.width <= WIDTH and item.y + item.height <= sheet.height
            continue
        width = text_width(item.text, item.size)
        if item.turn:  # turned by 40 degrees, ending where its operators begin
            assert item.x - 0.77 * width > 0 and item.x < WIDTH and item.y + 0.65 * width < sheet.height
        else:
            start = item.x - width if item.anchor == "end" else item.x
            assert start >= 0 and start + width <= WIDTH, item.text


def test_colours_of_bars_and_of_cuts_do_not_meet(gpt: Planned) -> None:
    boxes = [item for item in drawn(gpt).items if isinstance(item, Box)]
    bars = {box.fill for box in boxes if not box.hint and box.height == 18}
    cuts = {box.fill for box in boxes if box.hint}
    assert bars and cuts and not bars & cuts
    assert min(box.x for box in boxes) >= LEFT


def test_the_pdf_is_one_that_readers_can_follow(gpt: Planned) -> None:
    data = drawn(gpt).pdf()
    start = int(re.search(rb"startxref\n(\d+)\n%%EOF\n$", data)[1])  # type: ignore[index]
    table: Any = data[start:].split(b"trailer")[0].split(b"\n")
    assert table[0] == b"xref"
    places = [int(row.split()[0]) for row in table[3:] if row.endswith(b"n ")]
    assert [data[place:].split(b"\n")[0] for place in places] == [b"%d 0 obj" % n for n in range(1, len(places) + 1)]
    length = int(re.search(rb"/Length (\d+)", data)[1])  # type: ignore[index]
    content = data.split(b"\nstream\n")[1].split(b"\nendstream")[0]
    assert len(content) == length and b"(data-parallel) Tj" in content
    assert b"(a\\(b\\)) Tj" in Drawing(10, 10, (Words(0, 0, "a(b)"),)).pdf()
