"""``shardwright diff``: two plans side by side, what differs and what each difference costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli._plans import ModelOption, TrustOption, load_with_graph
from shardwright.cli._show import bytes_text, console, print_json, progress, seconds_text, table

SHOWN = 8
"""Decisions in the table; ``--json`` has all of them."""


def diff(
    first: Annotated[Path, typer.Argument(help="A plan written by `shardwright plan … -o plan.json`")],
    second: Annotated[Path, typer.Argument(help="Another plan of the same model")],
    html: Annotated[Path | None, typer.Option(help="Write a page with both timelines here")] = None,
    model: ModelOption = None,
    trust: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Compare FIRST and SECOND: which decisions differ, and how many seconds of the step each is worth.

    Example: shardwright diff found.json megatron.json --html diff.html
    """
    from shardwright.files import check_writable, write
    from shardwright.plans import Plan
    from shardwright.reports.diff import compare
    from shardwright.reports.diff_page import diff_page, headline, parts_text, signed

    check_writable(html)
    with progress(as_json) as say:
        say("reading the plans")
        other = Plan.load(second)
        one, graph = load_with_graph(first, model, trust)
        say("simulating both")
        found = compare(one, other, graph)
    names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
    if html is not None:
        write(html, diff_page(found, names))
    if as_json:
        print_json({"plans": [str(first), str(second)], **found.as_dict()})
        return
    steps = found.steps
    told = [
        f"{name}: {seconds_text(t.seconds)} a step, {bytes_text(t.peak_bytes)} a device, {side.shape}"
        for name, side, t in zip(names, steps, (side.timeline for side in steps), strict=True)
    ]
    console.print("\n".join(told))
    rows = [
        [
            d.what,
            d.first,
            d.second if d.differs else "the same",
            seconds_text(d.first_seconds),
            seconds_text(d.second_seconds),
            signed(d.difference),
            parts_text(d) + (f"; taken over alone: {seconds_text(d.alone)} a step" if d.alone is not None else ""),
        ]
        for d in found.decisions
        if d.differs or abs(d.difference) > 0.001 * abs(found.seconds)
    ][:SHOWN]
    caption = f"{headline(found)} Prices: {one.calibration}."
    columns = ["decision", names[0], names[1], "seconds", "seconds", "difference", "made of"]
    table(f"{names[1]} against {names[0]}", columns, rows, caption)
    if html is not None:
        console.print(f"written to {html}")
