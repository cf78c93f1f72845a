"""``shardwright simulate``: run a plan's training step in simulation and show where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli._options import WIDEST, check_numbers, check_whole
from shardwright.cli._plans import ModelOption, TrustOption, load_with_graph
from shardwright.cli._show import console, print_json, progress, seconds_text, table
from shardwright.cli._step import print_step, step_document
from shardwright.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.simulator.hardware_queue import Scene, Work


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
        int | None, typer.Option(help="What if the batch were cut into so many micro-batches", min=1)
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Price kernels, host and gradient reductions as this engine runs them: megatron-2021, …")
    ] = "",
    hardware_queue: Annotated[
        bool,
        typer.Option("--hardware-queue", help="What if devices had queues in hardware that hand rows to idle ones"),
    ] = False,
    queue_latency: Annotated[
        float | None, typer.Option(help="With --hardware-queue: seconds to be answered (that of the links otherwise)")
    ] = None,
    width: Annotated[int, typer.Option(help="Characters of the drawing of passes")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Simulate one training step of PLAN: step time, exposed communication, how busy every stream is, memory.

    Example: shardwright simulate plan.json --trace trace.json

    What if the links inside nodes were half as fast: shardwright simulate plan.json --link-rate gpu=0.5

    As another engine would run it: shardwright simulate plan.json --engine megatron-2021

    With work queues in hardware: shardwright simulate plan.json --hardware-queue --queue-latency 1e-5

    With other micro-batches: shardwright simulate plan.json --microbatches 32 --link-rate stages=0.5
    """
    from dataclasses import asdict, replace

    from shardwright.cluster.as_engine import as_engine
    from shardwright.files import check_writable
    from shardwright.reports.steps import PlanStep
    from shardwright.simulator import WhatIf, simulate_plan
    from shardwright.simulator.hardware_queue import scenes, work_of
    from shardwright.simulator.trace import write_trace

    check_writable(trace)
    check_whole("--width", width, WIDEST)
    check_numbers(zero=True, queue_latency=queue_latency)
    if queue_latency is not None and not hardware_queue:
        raise ShardwrightError("--queue-latency is about queues in hardware.", "Say --hardware-queue too.")
    asked = WhatIf(_factors(link_rate or []), device_speed, host_speed)
    with progress(as_json) as say:
        say("reading the plan")
        loaded, graph = load_with_graph(plan, model, trust)
        if engine:
            loaded = replace(loaded, cluster=as_engine(loaded.cluster, engine))
        say("simulating")
        step = PlanStep(loaded, graph, simulate_plan(loaded, graph, what_if=asked, microbatches=microbatches))
        work = work_of(loaded, graph, step.timeline) if hardware_queue else None
        queued = [] if work is None else scenes(work, queue_latency)
    if trace is not None:
        write_trace(step.timeline, trace)
    if as_json:
        further = {"engine": loaded.cluster.calibration} if engine else {}
        queues = {} if work is None else {"work": asdict(work), "scenes": [asdict(one) for one in queued]}
        print_json(step_document(step) | further | ({"hardware_queue": queues} if queues else {}))
        return
    print_step(step, width)
    if engine:
        console.print(f"as {loaded.cluster.calibration}", markup=False)
    if work is not None:
        _print_queues(work, queued, work.latency if queue_latency is None else queue_latency)
    if trace is not None:
        console.print(f"trace written to {trace}: open it in ui.perfetto.dev")


def _print_queues(work: Work, queued: Sequence[Scene], latency: float) -> None:
    """A row for every way in which speeds vary."""
    table(
        f"{work.rows} rows on {work.workers} workers that share them, a step's mean",
        ["speeds vary", "equal shares", "software", "queues", "both", "possible"],
        [
            [one.name, *map(seconds_text, (one.equal, one.software, one.queues, one.both, one.possible))]
            for one in queued
        ],
        f"A row computes for {seconds_text(work.row_seconds)}; {seconds_text(work.fixed_seconds)} of a step are not shared. "
        "Software shares rows anew between steps. Queues: a worker that has none left asks the fullest for one and waits "
        f"{seconds_text(latency + work.travel)} for it. Possible: were rows divisible and free to move. No such hardware "
        "exists.",
        spare=("both",),
    )


def _factors(texts: list[str]) -> dict[str, float]:
    factors = {}
    for text in texts:
        axis, _, number = text.partition("=")
        try:
            factors[axis] = float(number)
        except ValueError:
            raise ShardwrightError(f"--link-rate {text!r} is not AXIS=FACTOR.", "Write --link-rate gpu=0.5.") from None
    return factors
