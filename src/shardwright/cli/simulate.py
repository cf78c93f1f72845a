"""``shardwright simulate``: run a plan's training step in simulation and show where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli._checks import WIDEST, check_whole
from shardwright.cli._pipelines import show_timeline
from shardwright.cli._plans import ModelOption, TrustOption, load_with_graph
from shardwright.cli._show import bytes_text, console, print_json, progress, seconds_text, table

if TYPE_CHECKING:
    from shardwright.plans import Plan
    from shardwright.simulator import Timeline


def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan written by `shardwright plan … -o plan.json`")],
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace here")] = None,
    model: ModelOption = None,
    trust: TrustOption = False,
    link_rate: Annotated[
        list[str] | None,
        typer.Option(
            help="AXIS=FACTOR: what if that axis' link (of a pipeline also: stages) were so many times as fast"
        ),
    ] = None,
    device_speed: Annotated[float, typer.Option(help="What if devices computed so many times as fast")] = 1.0,
    host_speed: Annotated[float, typer.Option(help="What if the host issued so many times as fast")] = 1.0,
    microbatches: Annotated[
        int | None, typer.Option(help="What if a pipeline had so many micro-batches", min=1)
    ] = None,
    width: Annotated[int, typer.Option(help="Characters of the drawing of a pipeline")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Simulate one training step of PLAN: step time, exposed communication, how busy every stream is, memory.

    Example: shardwright simulate plan.json --trace trace.json

    What if the links inside nodes were half as fast: shardwright simulate plan.json --link-rate gpu=0.5

    A pipeline with other micro-batches: shardwright simulate plan.json --microbatches 32 --link-rate stages=0.5
    """
    from shardwright.files import check_writable
    from shardwright.simulator import WhatIf, simulate_plan
    from shardwright.simulator.trace import write_trace

    check_writable(trace)
    check_whole("--width", width, WIDEST)
    asked = WhatIf(_factors(link_rate or []), device_speed, host_speed)
    with progress(as_json) as say:
        say("reading the plan")
        loaded, graph = load_with_graph(plan, model, trust)
        say("simulating")
        timeline = simulate_plan(loaded, graph, what_if=asked, microbatches=microbatches)
    if trace is not None:
        write_trace(timeline, trace)
    if not timeline.pipeline.reduces_inside:
        show_timeline(loaded, timeline, width, as_json)
        return
    if as_json:
        print_json(_document(timeline))
        return
    _print(loaded, timeline)
    if trace is not None:
        console.print(f"trace written to {trace}: open it in ui.perfetto.dev")


def _factors(texts: list[str]) -> dict[str, float]:
    from shardwright.errors import ShardwrightError

    factors = {}
    for text in texts:
        axis, _, number = text.partition("=")
        try:
            factors[axis] = float(number)
        except ValueError:
            raise ShardwrightError(f"--link-rate {text!r} is not AXIS=FACTOR.", "Write --link-rate gpu=0.5.") from None
    return factors


def _document(timeline: Timeline) -> dict[str, Any]:
    (rank,) = timeline.ranks
    return {
        "step_seconds": timeline.seconds,
        "sum_seconds": timeline.sum_seconds,
        "exposed_seconds": timeline.exposed_seconds,
        "lower_bound_seconds": rank.lower_bound,
        "busy_seconds": rank.load,
        "utilisation": rank.utilisation,
        "peak_bytes": timeline.peak_bytes,
        "reserved_bytes": timeline.stage().memory.reserved,
        "communication": [
            {"collective": kind, "axis": axis, "times": count, "bytes": size}
            for (kind, axis), (count, size) in timeline.stage().priced.communication.items()
        ],
        "memory_curve": timeline.memory_curve(),
    }


def _print(plan: Plan, timeline: Timeline) -> None:
    (rank,) = timeline.ranks
    rows = [
        [stream, seconds_text(busy), f"{100 * rank.utilisation[stream]:.1f} %"] for stream, busy in rank.load.items()
    ]
    title = f"{plan.model or 'The model'} over {plan.shape}: {seconds_text(timeline.seconds)} a step"
    caption = (
        f"{seconds_text(timeline.exposed_seconds)} of communication exposed; no schedule of these events is shorter than "
        f"{seconds_text(rank.lower_bound)}. Peak memory {bytes_text(timeline.peak_bytes)}. "
        f"Prices: {plan.meshes[0].calibration}."
    )
    table(title, ["stream", "busy", "share of the step"], rows, caption)
    talk = [
        [kind, axis, str(count), bytes_text(size)]
        for (kind, axis), (count, size) in timeline.stage().priced.communication.items()
    ]
    if talk:
        table("Communication of one rank", ["collective", "axis", "times", "bytes"], talk)
