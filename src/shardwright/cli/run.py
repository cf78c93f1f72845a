"""``shardwright run``: start a training script under a plan, on one node or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    plan: Annotated[Path, typer.Argument(help="A plan.json made by `shardwright plan … -o plan.json`")],
    script: Annotated[list[str], typer.Argument(help="After --: the script and its own arguments")],
    nproc_per_node: Annotated[int | None, typer.Option(help="Processes on this node (the plan's otherwise)")] = None,
    nnodes: Annotated[str | None, typer.Option(help="Number of nodes (the plan's otherwise)")] = None,
    node_rank: Annotated[int | None, typer.Option(help="Which node this is, where the rendezvous cannot tell")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="host:port of the first node, for several nodes")] = None,
    max_restarts: Annotated[int, typer.Option(help="Restarts after a failure; resume from a checkpoint")] = 0,
    profile: Annotated[
        Path | None, typer.Option(help="Record the fourth step of rank 0 here, for `shardwright report --measured`")
    ] = None,
) -> None:
    """Start SCRIPT with torchrun on as many processes as PLAN is for.

    The script finds the plan in the environment: `shardwright.parallelize(model)` uses it when no plan is given.

    Example: shardwright run plan.json -- train.py --steps 1000

    Example: shardwright run plan.json --profile trace.json -- train.py    (then report plan.json --measured trace.json)

    Example: shardwright run plan.json --rdzv-endpoint host0:29400 -- train.py    (the same line on each of two nodes)
    """
    import os

    from shardwright.files import check_writable
    from shardwright.runtime.profiling import PROFILE_VARIABLE
    from shardwright.runtime.torchrun import start

    check_writable(profile)
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
    )
