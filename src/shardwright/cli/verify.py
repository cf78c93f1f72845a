"""``shardwright verify``: does the plan compute the same numbers as one process?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.cli._show import bytes_text, console, mesh_text, print_json, progress, table


def verify(
    model: Annotated[str, typer.Argument(help="gpt:small, gpt:layers=2,width=64, hf:gpt2:small, file.py:function")],
    cluster: Annotated[str, typer.Option(help="local:2, local:4: as many processes are started")] = "local:2",
    search: Annotated[str, typer.Option(help="auto, or a strategy by name: data-parallel, fsdp, megatron, …")] = "auto",
    plan: Annotated[Path | None, typer.Option(help="Verify this plan file instead of making a plan")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size (the model's default otherwise)")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length, for models that have one")] = None,
    steps: Annotated[int, typer.Option(help="AdamW steps to train", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="float32, or float64 for agreement within 1e-9")] = "float32",
    seconds: Annotated[float, typer.Option(help="Give up after so many seconds")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Train MODEL for a few steps on local processes and on one, and compare every number.

    Loss, gradients, updated parameters and buffers of the found plan must equal those of the unmodified model in one
    process: within 1e-9 in float64; in float32 no further from float64 than four times what one process is in float32,
    step by step. Exit status 0 only when all agree.

    Example: shardwright verify gpt:small --cluster local:4 --search fsdp --dtype float64
    """
    import functools

    from shardwright.errors import ShardwrightError
    from shardwright.plans import Plan
    from shardwright.search.strategies import check_name
    from shardwright.verification import verify as run

    check_name(search)
    if dtype not in ("float32", "float64"):
        raise ShardwrightError(f"Verification in {dtype!r} is not possible.", "Choose float32 or float64.")
    if plan is not None and (cluster, search) != ("local:2", "auto"):
        raise ShardwrightError(
            "--plan says what to run; --cluster and --search say what to plan.", "Leave out one or the other."
        )
    given = Plan.load(plan) if plan is not None else None
    with progress(as_json) as say:
        build = functools.partial(_built, model, batch, seq)
        verified, answer = run(
            build, cluster=cluster, search=search, steps=steps, dtype=dtype, seconds=seconds, plan=given, progress=say
        )
    if as_json:
        about = {"model": model, "search": verified.search, "mesh": verified.strategy.axes}
        print_json({**about, "processes": verified.strategy.devices, **answer.as_dict()})
    else:
        _print(model, verified.search, mesh_text(verified.strategy.axes), answer)
    if not answer.agrees:
        raise typer.Exit(1)


def _built(reference: str, batch: int | None, seq: int | None) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Module-level, so that every process can build the model for itself."""
    from shardwright.zoo.reference import resolve

    resolved = resolve(reference, batch=batch, seq=seq, device="cpu")
    return resolved.model, resolved.args, resolved.kwargs


def _print(model: str, search: str, mesh: str, answer: Any) -> None:
    from shardwright.verification.compare import KINDS

    rows = []
    for what in KINDS:
        worst = answer.worst(what)
        if worst is not None:
            compared = [item for item in answer.comparisons if item.what == what]
            verdict = "agree" if all(item.agrees for item in compared) else "DIFFER"
            times = f"{worst.times:.1f} ×" if worst.yardstick else ""
            where = worst.name if worst.difference else ""
            rows.append([what, str(len(compared)), f"{worst.relative:.1e}", times, where, verdict])
    sent = ", ".join(f"{count} {kind} ({bytes_text(size)})" for kind, (count, size) in answer.communication.items())
    caption = f"Loss {answer.losses[0]:.6g} → {answer.losses[-1]:.6g}. Communicated per step: {sent or 'nothing'}."
    if any(item.kink for item in answer.comparisons):
        caption += (
            " Some gradients jump within one rounding of the parameters, and stand on the other side than float64."
        )
    table(
        f"{model}: {search} on {mesh} against one process, {answer.dtype}",
        ["compared", "tensors", "worst relative difference", "of one process's own error", "where", "verdict"],
        rows,
        caption=caption,
    )
    for item in [item for item in answer.comparisons if not item.agrees][:10]:
        console.print(f"[red]differs[/red] {item.what} {item.name}: {item.difference:.3e} (allowed {item.allowed:.3e})")
