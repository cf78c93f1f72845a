"""``shardwright schedule``: the order of a pipeline's passes, timed, bounded and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli._options import WIDEST, check_seconds, check_whole
from shardwright.cli._show import console, finite, print_json, progress, table

if TYPE_CHECKING:
    from shardwright.schedules import Pipeline, Schedule, Timing

AUTO = "auto"


def schedule(
    stages: Annotated[int, typer.Option(help="Stages of the pipeline")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step")] = 16,
    schedule: Annotated[
        str,
        typer.Option(
            help="gpipe, 1f1b, zb-v or another by name (an unknown one lists them all), a CSV file of "
            "torch.distributed.pipelining, or auto: search for the best"
        ),
    ] = AUTO,
    devices: Annotated[
        int | None, typer.Option(help="Devices; without it one per stage, or half as many where two stages share one")
    ] = None,
    shape: Annotated[str, typer.Option(help="auto: where several stages share a device: loop or v")] = "loop",
    forward: Annotated[
        str, typer.Option(help="Seconds of a forward, one figure or one per stage: 0.02,0.02,0.03")
    ] = "1",
    backward: Annotated[str, typer.Option(help="Seconds of the gradient of the inputs, likewise")] = "1",
    weight: Annotated[str, typer.Option(help="Seconds of the gradient of the weights, likewise")] = "1",
    hop: Annotated[str, typer.Option(help="Seconds between neighbouring stages on different devices")] = "0",
    memory: Annotated[str, typer.Option(help="The most a device may hold, one figure or one per device")] = "inf",
    forward_memory: Annotated[
        str, typer.Option(help="What a forward leaves in memory, one figure or one per stage")
    ] = "1",
    backward_memory: Annotated[
        str, typer.Option(help="How that changes with the gradient of the inputs (negative); weights free the rest")
    ] = "0",
    sizes: Annotated[str, typer.Option(help="Relative sizes of unequal micro-batches: 1,1,1,0.5")] = "",
    objective: Annotated[
        str, typer.Option(help="span (the longest a device is busy) or makespan (from the first start to the last end)")
    ] = "span",
    time_limit: Annotated[float, typer.Option(help="auto: seconds of processor time")] = 10.0,
    csv: Annotated[Path | None, typer.Option(help="Write the orders as torch's CSV")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev, one row per device")] = None,
    width: Annotated[int, typer.Option(help="Characters of the drawing")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Order the passes of a pipeline, say what it costs and how good that provably is, and draw it.

    Example: shardwright schedule --stages 8 --microbatches 16 --schedule zb-v --hop 0.05

    Example: shardwright schedule --stages 4 --microbatches 12 --forward 5 --backward 6 --weight 4 --memory 5 --csv out.csv
    """
    from shardwright.errors import ProblemError
    from shardwright.files import check_writable
    from shardwright.schedules import check_memory, known_schedule, pipeline, read_csv, run, stage_devices, write_csv
    from shardwright.schedules.picture import write_trace
    from shardwright.search.schedule import OBJECTIVES, find_schedule, lower_bound

    if objective not in OBJECTIVES:
        raise ProblemError(f"there is no objective {objective!r}.", f"Objectives are {' and '.join(OBJECTIVES)}.")
    check_seconds(time_limit=time_limit)
    check_whole("--width", width, WIDEST)
    check_writable(csv, trace)
    order: Schedule | None = None
    if schedule.endswith(".csv"):
        order = read_csv(schedule)
        stages, microbatches = order.stages, order.microbatches
    elif schedule != AUTO:
        order = known_schedule(schedule, stages, microbatches, devices)
    shared = devices if devices is not None else stages // 2 if shape == "v" else stages
    problem = pipeline(
        order.device_of if order else stage_devices(shared, stages, shape),
        microbatches,
        _figures("--forward", forward),
        _figures("--backward", backward),
        _figures("--weight", weight),
        _figures("--hop", hop),
        _figures("--forward-memory", forward_memory),
        _figures("--backward-memory", backward_memory),
        limits=_figures("--memory", memory),
        sizes=_list("--sizes", sizes) if sizes else None,
    )
    seconds, bound = 0.0, lower_bound(problem, objective)
    if order is None:
        with progress(as_json) as say:
            say("scheduling")
            found = find_schedule(problem, objective, time_limit)
        order, bound, seconds = found.answer, found.lower_bound, found.seconds
    timing = run(order, problem)
    check_memory(timing)
    if csv is not None:
        write_csv(order, csv)
    if trace is not None:
        write_trace(timing, trace)
    _show(schedule, timing, problem, objective, bound, seconds, width, as_json)


def _show(
    name: str,
    timing: Timing,
    problem: Pipeline,
    objective: str,
    bound: float,
    seconds: float,
    width: int,
    as_json: bool,
) -> None:
    from shardwright.schedules.picture import draw
    from shardwright.search.solution import gap_of
    from shardwright.units import gap_text

    cost = timing.span if objective == "span" else timing.makespan
    gap = gap_of(cost, bound)
    optimal = gap <= 1e-12
    rows = [
        {
            "device": device,
            "stages": problem.stages_of(device),
            "work": problem.work[device],
            "span": timing.spans[device],
            "bubble": timing.bubbles[device],
            "peak_memory": timing.peak_memory[device],
            "memory_limit": None if problem.limits[device] == float("inf") else problem.limits[device],
        }
        for device in range(problem.devices)
    ]
    if as_json:
        print_json(
            {
                "schedule": name,
                "objective": objective,
                "span": timing.span,
                "makespan": timing.makespan,
                "bubble": timing.bubble,
                "lower_bound": bound,
                "optimal": optimal,
                "gap": finite(gap),
                "seconds": seconds,
                "devices": rows,
                "orders": [" ".join(map(str, order)) for order in timing.schedule.orders],
            }
        )
        return
    quality = gap_text(0.0 if optimal else gap, "all orders of these passes")
    searched = f" Searched for {seconds:.2f} s of processor time." if seconds else ""
    table(
        f"{name}: longest span {timing.span:.6g}, bubble {100 * timing.bubble:.2f} %, makespan {timing.makespan:.6g}; "
        f"bound on the {objective} {bound:.6g} ({quality})",
        ["device", "stages", "work", "span", "bubble", "memory at most", "of"],
        [
            [
                str(row["device"]),
                " ".join(map(str, problem.stages_of(device))),
                f"{row['work']:.6g}",
                f"{row['span']:.6g}",
                f"{100 * timing.bubbles[device]:.2f} %",
                f"{row['peak_memory']:g}",
                "–" if row["memory_limit"] is None else f"{row['memory_limit']:g}",
            ]
            for device, row in enumerate(rows)
        ],
        caption="Times and memory in the units given." + searched,
    )
    for line in draw(timing, width):
        console.print(line, soft_wrap=True, highlight=False)


def _list(option: str, text: str) -> list[float]:
    from shardwright.errors import ProblemError
    from shardwright.records import shown

    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ProblemError(
            f"{option} {shown(text)} is not a list of figures.", "Write one figure, or several as 1,2,3."
        ) from None


def _figures(option: str, text: str) -> float | list[float]:
    values = _list(option, text)
    return values[0] if len(values) == 1 else values
