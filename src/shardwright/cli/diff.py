"""``shardwright diff``: two plans side by side, what differs and what each difference costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli._plans import ModelOption, TrustOption, load_with_graph
from shardwright.cli._show import bytes_text, console, print_json, progress, seconds_text, table, tell

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
    from shardwright.reports.diff_page import COSTS, LEGEND, cost_texts, diff_page, headline, signed

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
    for name, side, timeline in zip(names, steps, (side.timeline for side in steps), strict=True):
        took = f"{seconds_text(timeline.seconds)} a step, {bytes_text(timeline.peak_bytes)} a device"
        console.print(f"{name}: {took}, {side.shape}", markup=False, highlight=False)
    telling = [d for d in found.decisions if d.differs or abs(d.difference) > 0.001 * abs(found.seconds)][:SHOWN]
    rows = [[d.what, *cost_texts(d), signed(d.difference)] for d in telling]
    heads = ["decision", *COSTS, "difference"]
    said = [n for n in range(len(heads)) if any(row[n] != "–" for row in rows)]  # a column of nothing is left out
    cells = [[row[n] for n in said] for row in rows]
    table(f"{names[1]} against {names[0]}", [heads[n] for n in said], cells, LEGEND, spare=("hidden", "idle"))
    for d in telling:
        if d.differs:
            alone = "" if d.alone is None else f"; taken over alone: {seconds_text(d.alone)} a step"
            tell(f"- {d.what}. {names[0]}: {d.first}. {names[1]}: {d.second}{alone}")
    tell(f"{headline(found)} Prices: {one.calibration}.")
    if html is not None:
        console.print(f"written to {html}")
