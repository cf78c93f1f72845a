"""``python -m bench.published``: solve a published problem and say how good the answer is.

``joint PROBLEM.json``: cuts, devices, degrees and recomputing. ``rebalance JOB.json``: the work of a measured job shared
anew.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.published.formats import solve_file
from bench.published.rebalance import as_run, rebalance, step_seconds
from bench.published.rebalance.sequences import Sequences, as_measured, deal_out, seconds_of
from bench.published.rebalance.traces import read_job
from shardwright.errors import ProblemError, ShardwrightError
from shardwright.units import gap_text

app = typer.Typer(name="python -m bench.published", no_args_is_help=True, pretty_exceptions_enable=False)
console = Console() if Console().is_terminal else Console(width=140)


@app.callback()
def _options() -> None:
    """Problems that other people published, solved and proved."""


@app.command()
def joint(
    problem: Annotated[Path, typer.Argument(help="A problem of Piper, Galvatron (tables) or Aceso: .json")],
    devices: Annotated[int | None, typer.Option(help="Piper: devices instead of the file's")] = None,
    memory: Annotated[float | None, typer.Option(help="Piper: GiB per device instead of the file's")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Piper: GiB/s of a link instead of the file's")] = None,
    model: Annotated[str | None, typer.Option(help="Aceso, Galvatron: which model or problem of the file")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds; then the best found so far, and its bound")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Cut PROBLEM into stages, give them devices and ways to run, and prove how good that is.

    Example: python -m bench.published joint bert32a100.json --devices 8 --memory 80 --bandwidth 25

    Example: python -m bench.published joint aceso_l4.json --model gpt-2.6B --json
    """
    check_numbers(devices=devices, memory=memory, bandwidth=bandwidth, time_limit=time_limit)
    gib = 2.0**30
    found = solve_file(
        problem,
        devices=devices,
        memory=memory and memory * gib,
        bandwidth=bandwidth and bandwidth * gib,
        model=model,
        time_limit=time_limit,
    )
    if as_json:
        print(json.dumps(asdict(found), indent=1, default=str))
        return
    quality = gap_text(found.gap, "its plans")
    columns = [key for key in found.stages[0] if key != "recompute"]
    _table(
        f"{found.name} ({found.kind}): {found.measure} {found.cost:.7g}, bound {found.lower_bound:.7g} ({quality})",
        columns,
        [[_text(row[key]) for key in columns] for row in found.stages],
        f"Solved in {found.seconds:.2f} s.",
    )


@app.command(name="rebalance")
def share_anew(
    job: Annotated[Path, typer.Argument(help="A measured job (replicas × stages, seconds per micro-batch): .json")],
    layers: Annotated[str, typer.Option(help="What may move beside shares: fixed, common or own cuts")] = "fixed",
    blocks: Annotated[int | None, typer.Option(help="A stage consists of so many blocks that stay whole")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Share the work of JOB anew, and say what no sharing undercuts.

    Example: python -m bench.published rebalance tests/data/stragglers/AR.json --layers common
    """
    running = read_job(job)
    if isinstance(running, Sequences):
        if layers != "fixed" or blocks is not None:
            raise ProblemError(
                f"the sequences of {job} differ.", "Leave --layers and --blocks out: sequences are dealt."
            )
        _show_sequences(job, running, as_json)
        return
    before, found = step_seconds(running, as_run(running)), rebalance(running, layers, blocks)
    if as_json:
        answer = {"name": job.stem, "as_run": before, **asdict(found)}
        print(json.dumps(answer, indent=1, default=str))
        return
    _table(
        f"{job.stem}: {before:.4g} s as run, {found.cost:.4g} s shared anew, bound {found.lower_bound:.4g} "
        f"({gap_text(found.gap, 'its plans')})",
        ["replica", "micro-batches", "cut at"],
        [
            [str(replica), str(share), _text(cuts)]
            for replica, (share, cuts) in enumerate(zip(found.answer.shares, found.answer.cuts, strict=True))
        ],
        f"Decided in {found.seconds:.2f} s.",
    )


def _show_sequences(job: Path, running: Sequences, as_json: bool) -> None:
    steps = range(running.shape[0])
    before = sum(seconds_of(running, step, as_measured(running)) for step in steps) / len(steps)
    found = deal_out(running)
    if as_json:
        print(json.dumps({"name": job.stem, "as_run": before, **asdict(found)}, indent=1, default=str))
        return
    _table(
        f"{job.stem}: sequences differ; {before:.4g} s as run, {found.cost:.4g} s dealt longest first, bound "
        f"{found.lower_bound:.4g} ({gap_text(found.gap, 'its plans')})",
        ["step", "as run, s", "dealt anew, s", "micro-batches of a replica"],
        [
            [
                str(step),
                f"{seconds_of(running, step, as_measured(running)):.4g}",
                f"{seconds_of(running, step, dealt):.4g}",
                f"{min(map(len, dealt))}–{max(map(len, dealt))}",
            ]
            for step, dealt in enumerate(found.answer)
        ],
        f"Decided in {found.seconds:.2f} s for {len(steps)} steps.",
    )


def main() -> None:
    """Run a command; what a reader can act on is one sentence and a remedy, with exit status 2."""
    try:
        app()
    except ShardwrightError as error:
        print(f"{app.info.name}: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"  {error.remedy}", file=sys.stderr)
        sys.exit(2)


def check_numbers(**options: float | None) -> None:
    """Refuse options that are no finite numbers above zero."""
    for name, value in options.items():
        if value is not None and not 0 < value < 1e15:
            raise ProblemError(f"--{name.replace('_', '-')} {value} means nothing.", "Give a number above 0.")


def _table(title: str, columns: list[str], rows: list[list[str]], caption: str) -> None:
    grid = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        grid.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        numbers = [v for v in value if isinstance(v, int)]
        if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{numbers[0]}–{numbers[-1]}"
        return " ".join(_text(v) for v in value)
    return str(value)


if __name__ == "__main__":
    main()
