"""What is asked of a plan on the command line, by every command that makes one; numbers that mean nothing are refused before
any work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.errors import ShardwrightError
from shardwright.records import shown

if TYPE_CHECKING:
    from shardwright.planner import Pipelining

MaxAxesOption = Annotated[int, typer.Option(help="Mesh axes to search over, at most")]
PinOption = Annotated[
    list[str] | None,
    typer.Option(help="NAME=S0,R (a parameter, an input) or NAME=loop,none (an operator): insist on it (repeatable)"),
]
ForbidOption = Annotated[list[str] | None, typer.Option(help="NAME@AXIS: that axis must not cut it (repeatable)")]
MemoryOption = Annotated[float | None, typer.Option(help="GB per device to stay below (the device's own otherwise)")]
RecomputeOption = Annotated[
    str,
    typer.Option(
        help="Recompute activations in backward: auto (if memory is short), none, light (what is cheap to compute: "
        "norms, activations, scores) or blocks (everything in them)"
    ),
]
StagesOption = Annotated[
    str | None,
    typer.Option(
        help="Run as a pipeline of so many stages (with --microbatches alone: one); auto: search pipelines too and take "
        "the faster of both; none: no pipelines; otherwise large models on several nodes have them searched"
    ),
]
MicrobatchesOption = Annotated[
    str | None,
    typer.Option(help="Cut the batch into so many micro-batches, or auto (gradient accumulation: --stages 1)"),
]
ScheduleOption = Annotated[
    str,
    typer.Option(
        help="Order of a pipeline's passes: gpipe, 1f1b, zb-v or another by name (an unknown one lists them all), a CSV "
        "file of torch.distributed.pipelining, or auto: search for the best"
    ),
]
CutOption = Annotated[
    list[str] | None, typer.Option(help="Begin a stage at this module: blocks.6 (repeatable; otherwise balanced)")
]

AdviceOption = Annotated[
    bool,
    typer.Option(
        "--advice", help="Also what is yours to change (padding, dtype, batch), each simulated, and what binds next"
    ),
]

MOST = 100_000
"""Stages and micro-batches that anybody could mean."""


def pipelining(
    stages: str | None, microbatches: str | None, schedule: str, cuts: Sequence[str], norm: str = "whole"
) -> Pipelining | None:
    """What the command line asks of a pipeline; refused before any work where it means nothing."""
    from shardwright.errors import ShardwrightError
    from shardwright.planner import Pipelining
    from shardwright.schedules import RECIPES, read_csv

    if norm not in ("whole", "per-piece"):
        raise ShardwrightError(f"--batch-norm {norm!r} is not known.", "Write whole or per-piece.")
    if stages in ("auto", "none"):
        if microbatches is not None or cuts or schedule != "auto":
            what = "chooses micro-batches, cuts and schedule itself" if stages == "auto" else "asks for no pipeline"
            raise ShardwrightError(f"--stages {stages} {what}.", "Give a number of stages with these.")
        return None
    if stages is None and microbatches is None and not cuts:
        if schedule != "auto":
            raise ShardwrightError(f"--schedule {schedule} orders the passes of a pipeline.", "Say --stages 4 too.")
        if norm != "whole":
            raise ShardwrightError(f"--batch-norm {norm} is about micro-batches.", "Say --microbatches 4 too.")
        return None
    if schedule.endswith(".csv"):
        read_csv(schedule)
    elif schedule != "auto" and schedule not in RECIPES:
        raise ShardwrightError(f"There is no schedule {schedule!r}.", f"There are auto, {', '.join(RECIPES)}.")
    count = _whole("stages", stages) if stages is not None else len(cuts) + 1
    number = None if microbatches in (None, "auto") else _whole("microbatches", str(microbatches))
    return Pipelining(count, number, schedule, cuts, norm)


def _whole(flag: str, text: str) -> int:
    from shardwright.errors import ShardwrightError

    if not text.isdecimal():
        raise ShardwrightError(f"--{flag} {shown(text)} is no number.", f"Write --{flag} 4, or auto.")
    if len(text) > len(str(MOST)) or not 1 <= int(text) <= MOST:
        raise ShardwrightError(f"--{flag} {shown(text)} means nothing.", f"Give a number from 1 to {MOST:,}.")
    return int(text)


WIDEST = 10_000
"""Characters of a drawing."""
MOST_SECONDS = 30 * 24 * 3600.0
"""A month: the most that any option may ask to be searched or waited for."""


def check_seconds(*, zero: bool = False, **options: float | None) -> None:
    """Refuse a time that nobody would wait for.

    >>> check_seconds(time_limit=3.0)
    """
    check_numbers(zero=zero, **options)
    for name, value in options.items():
        if value is not None and value > MOST_SECONDS:
            raise ShardwrightError(
                f"--{name.replace('_', '-')} {value:g} is longer than a month.", f"Give at most {MOST_SECONDS:.0f} s."
            )


def check_whole(flag: str, value: int | None, most: int, least: int = 1) -> None:
    """Refuse a whole number outside of what anybody could mean.

    >>> check_whole("--width", 120, 10_000)
    """
    if value is not None and not least <= value <= most:
        raise ShardwrightError(f"{flag} {shown(value)} means nothing.", f"Give a number from {least} to {most:,}.")


def check_numbers(*, zero: bool = False, **options: float | None) -> None:
    """Refuse an option that is not a finite number above zero (or zero, where that means something).

    >>> check_numbers(time_limit=3.0, batch=None)
    """
    for name, value in options.items():
        if value is not None and not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
            least = "of at least 0" if zero else "above 0"
            raise ShardwrightError(f"--{name.replace('_', '-')} {value} means nothing.", f"Give a number {least}.")
