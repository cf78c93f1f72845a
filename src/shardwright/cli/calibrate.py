"""``shardwright calibrate``: measure the machine it runs on and write a device file."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn as Bar
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardwright.cli._options import check_numbers

MOST_SECONDS = 3600.0


def calibrate(
    target: str = typer.Argument(
        "auto", help="'auto' (the GPU if there is one), 'cuda', 'local:N' for N CPU processes, 'hosts' under torchrun"
    ),
    output: Path | None = typer.Option(None, "-o", "--output", help="device file to write; local:N is also cached"),
    seconds: float = typer.Option(150.0, help="most seconds to spend on kernels"),
    raw: Path | None = typer.Option(None, help="also write every measured point, as JSON"),
) -> None:
    """Measure kernels, dispatch, optimizers and collectives on this machine, in under three minutes.

    Example: [bold]shardwright calibrate -o device.toml[/bold], then [bold]shardwright plan gpt --cluster device.toml[/bold].
    [bold]shardwright calibrate local:2[/bold] calibrates this machine's CPU as two processes and remembers it.
    [bold]torchrun … -m shardwright calibrate hosts -o cluster.toml[/bold] (one process a host) measures CPUs and network.
    """
    from shardwright.cluster.calibrate import run
    from shardwright.errors import ShardwrightError
    from shardwright.files import check_writable, write

    check_numbers(seconds=seconds)
    if seconds > MOST_SECONDS:
        raise ShardwrightError(
            f"--seconds {seconds:g} would calibrate for more than {MOST_SECONDS:g} s.",
            "150 s are enough on every machine.",
        )
    check_writable(output, raw)
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), Bar(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("calibrating", total=1.0)
        result = run(target, seconds, lambda share, what: bar.update(task, completed=share, description=what))
    if raw is not None:
        write(raw, json.dumps(result.raw))
    if output is not None:
        write(output, result.text)
    console.print(f"{result.summary}" + (f"\nwritten to {output}" if output is not None else ""))
