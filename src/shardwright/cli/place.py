"""``shardwright place``: put operators on devices, for the throughput of a pipeline or the latency of one sample."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli._options import check_numbers, check_seconds, check_whole
from shardwright.cli._show import bytes_text, finite, print_json, progress, table

if TYPE_CHECKING:
    from shardwright.search.place.problem import Workload


def place(
    workload: Annotated[
        str, typer.Argument(help="A placement workload (.json), a PipeDream profile (.txt), or a model such as gpt")
    ],
    objective: Annotated[
        str, typer.Option(help="throughput (a stream of samples) or latency (one sample)")
    ] = "throughput",
    solver: Annotated[
        str,
        typer.Option(
            help="throughput: auto, exact, order, heuristic, program, local-search, equal-shares, one-device; "
            "latency: auto, program, heuristic, greedy"
        ),
    ] = "auto",
    noncontiguous: Annotated[bool, typer.Option("--noncontiguous", help="Let a device hold any set of nodes")] = False,
    replicate: Annotated[bool, typer.Option("--replicate", help="Let a stage run on several devices")] = False,
    overlap: Annotated[bool, typer.Option("--overlap", help="Transfers run beside the computation")] = False,
    separate_passes: Annotated[
        bool, typer.Option("--separate-passes", help="Minimise max forward + max backward load")
    ] = False,
    subgraphs: Annotated[int, typer.Option(help="Latency: subgraphs per accelerator, at most")] = 1,
    time_limit: Annotated[
        float, typer.Option(help="Seconds for the programs; incumbent and bound are shown then")
    ] = 60.0,
    cluster: Annotated[str | None, typer.Option(help="For a model: 8xH200, local:2 or a TOML file")] = None,
    batch: Annotated[int | None, typer.Option(help="For a model: (micro-)batch size")] = None,
    inference: Annotated[bool, typer.Option("--inference", help="For a model: forward only")] = False,
    devices: Annotated[int, typer.Option(help="For a PipeDream profile: accelerators")] = 4,
    bandwidth: Annotated[float, typer.Option(help="For a PipeDream profile: bytes/s of a link")] = 1.25e9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Place WORKLOAD on its devices and say how good that is.

    Example: shardwright place workload.json --objective latency --time-limit 30

    Example: shardwright place gpt:layers=12 --cluster 8xH200 --batch 8
    """
    from shardwright.cluster.hardware import MOST_DEVICES
    from shardwright.search.place.problem import Rules
    from shardwright.search.place.report import limiting, stage_rows
    from shardwright.search.place.solve import place as solve
    from shardwright.units import gap_text

    check_seconds(time_limit=time_limit)
    check_whole("--devices", devices, MOST_DEVICES)
    check_numbers(batch=batch, devices=devices, bandwidth=bandwidth, subgraphs=subgraphs)
    rules = Rules(overlap=overlap, replicate=replicate, separate_passes=separate_passes)
    with progress(as_json) as say:
        say("reading")
        loaded, unit, prices = _load(workload, cluster, batch, inference or objective == "latency", devices, bandwidth)
        if replicate and loaded.backward.any() and loaded.sync_bandwidth == float("inf"):
            prices += " Replicas synchronise for free: the file has no syncBandwidth."
        say("placing")
        found = solve(
            loaded,
            objective,
            solver=solver,
            contiguous=not noncontiguous,
            rules=rules,
            subgraphs=subgraphs,
            time_limit=time_limit,
        )
    rows = stage_rows(loaded, found.answer, rules)
    if as_json:
        print_json(
            {
                "workload": workload,
                "objective": objective,
                "cost": found.cost,
                "lower_bound": found.lower_bound,
                "optimal": found.optimal,
                "gap": finite(found.gap),
                "seconds": found.seconds,
                "limiting": limiting(rows),
                "prices": prices,
                "stages": [{**vars(row), "room": None if row.room == float("inf") else row.room} for row in rows],
                "placement": {
                    str(name): int(s) for name, s in zip(_labels(loaded), found.answer.stage_of, strict=True)
                },
            }
        )
        return
    quality = gap_text(found.gap, f"{'all' if noncontiguous else 'contiguous'} placements")
    what = "time per sample" if objective == "throughput" else "latency"
    table(
        f"{workload}: {what} {found.cost:.6g}{unit}, bound {found.lower_bound:.6g}{unit} ({quality})",
        ["stage on", "nodes", "load", "computing", "receiving", "sending", "synchronising", "memory", "of"],
        [
            [
                row.devices,
                str(row.nodes),
                *(f"{value:.5g}" for value in (row.load, row.compute, row.receive, row.send, row.sync)),
                bytes_text(row.memory),
                "–" if row.room == float("inf") else bytes_text(row.room),
            ]
            for row in rows
        ],
        caption=f"Limited by {limiting(rows)}. Solved in {found.seconds:.2f} s. {prices}",
        spare=("synchronising", "sending", "receiving"),
    )


def _load(
    name: str, cluster: str | None, batch: int | None, inference: bool, devices: int, bandwidth: float
) -> tuple[Workload, str, str]:
    """The workload, the unit of its times, and where its prices come from."""
    from shardwright.errors import ProblemError
    from shardwright.search.place.formats import read_profile, read_workload

    path = Path(name)
    if cluster is None:
        if path.suffix == ".txt":
            return read_profile(path, devices=devices, bandwidth=bandwidth), " s", f"Times of the profile {path.name}."
        if path.suffix == ".json":
            return read_workload(path), "", "Times in the workload's own unit."
        raise ProblemError(
            f"{name!r} is neither a workload (.json) nor a profile (.txt).", "For a model, say which --cluster to use."
        )
    return _price(name, cluster, batch, inference)


def _price(name: str, cluster: str, batch: int | None, inference: bool) -> tuple[Workload, str, str]:
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.search.place.price import workload_of
    from shardwright.zoo.reference import resolve

    target = parse_cluster(cluster)
    resolved = resolve(name, batch=batch)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    return workload_of(graph, target, training=not inference), " s", f"Prices: {target.calibration}."


def _labels(workload: Any) -> list[str]:
    return [f"{i} {workload.label(i)}" if workload.names else str(i) for i in range(workload.nodes)]
