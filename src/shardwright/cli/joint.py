"""``shardwright joint``: solve a published joint problem (cuts, devices, degrees, recomputing) and say how good that is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli._show import print_json, progress, table


def joint(
    problem: Annotated[Path, typer.Argument(help="A problem of Piper, Galvatron (tables) or Aceso: .json")],
    devices: Annotated[int | None, typer.Option(help="Piper: devices instead of the file's")] = None,
    memory: Annotated[float | None, typer.Option(help="Piper: GiB per device instead of the file's")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Piper: GiB/s of a link instead of the file's")] = None,
    model: Annotated[str | None, typer.Option(help="Aceso: which model of the file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Cut PROBLEM into stages, give them devices and ways to run, and prove how good that is.

    Example: shardwright joint bert32a100.json --devices 8 --memory 80 --bandwidth 25

    Example: shardwright joint aceso_l4.json --model gpt-2.6B --json
    """
    from shardwright.search.joint.formats import solve_file

    gib = 2.0**30
    with progress(as_json) as say:
        say("solving")
        found = solve_file(
            problem,
            devices=devices,
            memory=memory and memory * gib,
            bandwidth=bandwidth and bandwidth * gib,
            model=model,
        )
    if as_json:
        print_json(asdict(found))
        return
    quality = "optimal" if found.optimal else f"at most {100 * found.gap:.2g} % above the optimum"
    columns = [key for key in found.stages[0] if key != "recompute"]
    table(
        f"{found.name} ({found.kind}): {found.measure} {found.cost:.7g}, bound {found.lower_bound:.7g} ({quality})",
        columns,
        [[_text(row[key]) for key in columns] for row in found.stages],
        caption=f"Solved in {found.seconds:.2f} s.",
    )


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        numbers = [v for v in value if isinstance(v, int)]
        if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{numbers[0]}–{numbers[-1]}"
        return " ".join(_text(v) for v in value)
    return str(value)
