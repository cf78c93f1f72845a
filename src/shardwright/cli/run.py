"""``shardwright run``: start a training script under a plan, on one node or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """``--assist`` alone means ``--assist=act``: typer knows no options whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args.index("--") if "--" in args else len(args)
        meant = ["--assist=act" if argument == "--assist" else argument for argument in args[:own]]
        return super().parse_args(ctx, meant + args[own:])


def run(
    plan: Annotated[Path, typer.Argument(help="A plan.json made by `shardwright plan … -o plan.json`")],
    script: Annotated[list[str], typer.Argument(help="After --: the script and its own arguments")],
    nproc_per_node: Annotated[int | None, typer.Option(help="Processes on this node (the plan's otherwise)")] = None,
    nnodes: Annotated[str | None, typer.Option(help="Number of nodes (the plan's otherwise)")] = None,
    node_rank: Annotated[int | None, typer.Option(help="Which node this is, where the rendezvous cannot tell")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="host:port of the first node, for several nodes")] = None,
    max_restarts: Annotated[int, typer.Option(help="Restarts after a failure; resume from a checkpoint")] = 0,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Nodes may be lost or join (--nnodes 1:2): plan anew for those there are")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Record the fifth step here, for `shardwright report --measured`; of a pipeline every rank's, beside it"
        ),
    ] = None,
    assist: Annotated[
        str | None,
        typer.Option(
            metavar="[=watch]", help="Move work away from ranks and links that become slower; =watch only tells"
        ),
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option(help="With --assist: a JSON line per decision; the picture of speeds and shares lies beside it"),
    ] = None,
) -> None:
    """Start SCRIPT with torchrun on as many processes as PLAN is for.

    The script finds the plan in the environment: `shardwright.parallelize(model)` uses it when no plan is given.

    Example: shardwright run plan.json -- train.py --steps 1000

    Example: shardwright run plan.json --profile trace.json -- train.py    (then report plan.json --measured trace.json)

    Example: shardwright run plan.json --assist --events events.jsonl -- train.py    (events.svg is the picture)

    Example: shardwright run plan.json --rdzv-endpoint host0:29400 -- train.py    (the same line on each of two nodes)

    Example: shardwright run plan.json --elastic --nnodes 1:2 --rdzv-endpoint host0:29400 --max-restarts 3 -- train.py
    """
    import os

    from shardwright.files import check_writable, write
    from shardwright.reports.assistance import draw_events
    from shardwright.runtime.assistant import ask_for
    from shardwright.runtime.profiling import PROFILE_VARIABLE
    from shardwright.runtime.torchrun import start

    check_writable(profile, events)
    os.environ.update(ask_for(assist, events))
    if events is not None:
        write(events, "")  # the job adds to it, also when it starts again
    if profile is not None:
        os.environ[PROFILE_VARIABLE] = str(profile.resolve())
    start(
        plan,
        script,
        nproc_per_node=nproc_per_node,
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        max_restarts=max_restarts,
        elastic=elastic,
    )
    if events is not None:
        print(f"speeds and shares over time: {draw_events(events)}")
