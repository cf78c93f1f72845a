"""``shardwright doctor``: what this machine has, what is wrong and what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from shardwright.cli._show import console, print_json, progress, table


def doctor(
    processes: Annotated[
        bool, typer.Option("--processes/--no-processes", help="Also start two processes and let them meet")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Look at this machine: devices, versions, solvers, caches, calibration, and whether two local processes work.

    Exit status 1 where something is wrong.

    Example: shardwright doctor
    """
    from shardwright.reports.machine import examine

    checks = []
    with progress(as_json) as say:
        for check in examine(processes):
            say(f"looked at {check.name}")
            checks.append(check)
    ill = [check for check in checks if check.fine is False]
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        marks = {True: "fine", False: "WRONG", None: "–"}
        table("This machine", ["what", "", "found"], [[c.name, marks[c.fine], c.found] for c in checks])
        for check in checks:
            if check.remedy and check.fine is not True:
                console.print(f"{check.name}: {check.remedy}")
        console.print("Something is wrong." if ill else "Nothing is wrong.")
    if ill:
        raise typer.Exit(1)
