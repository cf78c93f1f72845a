"""``shardwright tour``: the first five minutes, ending with a verified plan of the user's own model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli._show import console
from shardwright.cli.plan import plan as plan_command
from shardwright.cli.report import report as report_command
from shardwright.cli.verify import verify as verify_command

SMALL = "gpt:layers=2,width=64,heads=2,vocab=256"


def tour(
    model: Annotated[
        str | None, typer.Option(help="Your own model, where the tour is not to ask: file.py:function")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster to plan for, where the tour is not to ask")] = None,
    folder: Annotated[Path, typer.Option(help="Where to write the tour's plans and page")] = Path("shardwright-tour"),
    yes: Annotated[bool, typer.Option("--yes", help="Take every suggestion without asking")] = False,
) -> None:
    """Walk through planning, looking and verifying, with your own model: five minutes, nothing is installed or sent.

    Example: shardwright tour
    """
    from shardwright.cluster import parse_cluster
    from shardwright.errors import ShardwrightError
    from shardwright.zoo.reference import resolve

    def ask(question: str, suggested: str, given: str | None, check: Callable[[str], object]) -> str:
        """What was given, or an answer that means something: others are explained, and asked for again."""
        if given or yes:
            return given or suggested
        while True:
            answer = str(typer.prompt(question, default=suggested)).strip()
            try:
                check(answer)
            except ShardwrightError as problem:
                console.print(f"{problem.message}\n  {problem.remedy}", highlight=False, markup=False)
            else:
                return answer

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ShardwrightError(
            f"Cannot make the folder {str(folder)!r}: {problem.strerror}.", "Name another: --folder."
        ) from None
    console.print(
        "[bold]1 of 3: a plan.[/bold] Shardwright splits a model that you do not change over a cluster that you need not "
        "have.\nA model is a name of the zoo (shardwright models), hf:CONFIG, or your own: file.py:function, where the "
        "function returns (module, args, kwargs)."
    )
    reference = ask("Which model", SMALL, model, resolve)
    target = ask("Which cluster", "8xH100", cluster, parse_cluster)
    written = folder / "plan.json"
    _says(f"shardwright plan {reference} --cluster {target} -o {written}")
    plan_command(model=reference, cluster=[target], output=written)
    console.print("\n[bold]2 of 3: a look.[/bold] One file, open it in a browser: timeline, memory, layouts, what-ifs.")
    _says(f"shardwright report {written} -o {folder / 'plan.html'}")
    report_command(plan=written, output=folder / "plan.html", why_seconds=5.0)
    console.print(
        "\n[bold]3 of 3: proof.[/bold] Does a split model compute the same numbers? Two processes of this machine train it "
        "for a step, one process trains the original, every number is compared. The first time, the machine is measured for "
        "40 s."
    )
    if not yes and not typer.confirm("Go on", default=True):
        raise typer.Exit
    own = folder / "local.json"
    _says(f"shardwright plan {reference} --cluster local:2 --all-devices -o {own}")
    plan_command(model=reference, cluster=["local:2"], all_devices=True, output=own)
    _says(f"shardwright verify {reference} --plan {own} --steps 1 --dtype float32")
    verify_command(model=reference, plan=own, steps=1, dtype="float32")
    console.print(
        f"\n[bold]Done.[/bold] {own} is a verified plan of {reference}. To train with it:\n"
        f"  model = shardwright.parallelize(model, shardwright.Plan.load({str(own)!r}))\n"
        f"  shardwright run {own} -- train.py\n"
        "Next: docs/planning.md, docs/running.md, docs/page.md; shardwright doctor where something does not work."
    )


def _says(command: str) -> None:
    console.print(f"[bold]$[/bold] {command}", highlight=False)
