"""``shardwright verify``: does the plan compute the same numbers as one process?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardwright.cli._show import bytes_text, console, mesh_text, print_json, progress, table


def verify(
    model: Annotated[str, typer.Argument(help="gpt:small, gpt:layers=2,width=64, hf:gpt2:small, file.py:function")],
    cluster: Annotated[str, typer.Option(help="local:2, local:4: as many processes are started")] = "local:2",
    search: Annotated[str, typer.Option(help="auto, or a strategy by name: data-parallel, fsdp, megatron, …")] = "auto",
    batch: Annotated[int | None, typer.Option(help="Batch size (the model's default otherwise)")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length, for models that have one")] = None,
    steps: Annotated[int, typer.Option(help="AdamW steps to train", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="float32, or float64 for agreement within 1e-9")] = "float32",
    seconds: Annotated[float, typer.Option(help="Give up after so many seconds")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Train MODEL for a few steps on local processes and on one, and compare every number.

    Loss, gradients, updated parameters and buffers of the found plan must equal those of the unmodified model in one
    process, up to the order of floating-point sums. Exit status 0 only when all agree.

    Example: shardwright verify gpt:small --cluster local:4 --search fsdp --dtype float64
    """
    import functools

    from shardwright.errors import ShardwrightError
    from shardwright.runtime import verify as run
    from shardwright.search.strategies import check_name

    check_name(search)
    if dtype not in ("float32", "float64"):
        raise ShardwrightError(f"Verification in {dtype!r} is not possible.", "Choose float32 or float64.")
    with progress(as_json) as say:
        build = functools.partial(_built, model, batch, seq)
        plan, answer = run(
            build, cluster=cluster, search=search, steps=steps, dtype=dtype, seconds=seconds, progress=say
        )
    if as_json:
        print_json(
            {"model": model, "cluster": cluster, "search": search, "mesh": plan.strategy.axes, **answer.as_dict()}
        )
    else:
        _print(model, plan.search, mesh_text(plan.strategy.axes), answer)
    if not answer.agrees:
        raise typer.Exit(1)


def _built(reference: str, batch: int | None, seq: int | None) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Module-level, so that every process can build the model for itself."""
    from shardwright.zoo.reference import resolve

    resolved = resolve(reference, batch=batch, seq=seq, device="cpu")
    return resolved.model, resolved.args, resolved.kwargs


def _print(model: str, search: str, mesh: str, answer: Any) -> None:
    rows = []
    for what in ("loss", "gradient", "parameter", "buffer"):
        worst = answer.worst(what)
        if worst is not None:
            compared = sum(1 for item in answer.comparisons if item.what == what)
            verdict = "agree" if all(i.agrees for i in answer.comparisons if i.what == what) else "DIFFER"
            rows.append([what, str(compared), f"{worst.relative:.1e}", worst.name, verdict])
    sent = ", ".join(f"{count} {kind} ({bytes_text(size)})" for kind, (count, size) in answer.communication.items())
    table(
        f"{model}: {search} on {mesh} against one process, {answer.dtype}",
        ["compared", "tensors", "largest relative difference", "where", "verdict"],
        rows,
        caption=f"Loss {answer.losses[0]:.6g} → {answer.losses[-1]:.6g}. Communicated per step: {sent or 'nothing'}.",
    )
    if not answer.agrees:
        for item in [item for item in answer.comparisons if not item.agrees][:10]:
            console.print(
                f"[red]differs[/red] {item.what} {item.name}: {item.difference:.3e} (allowed {item.allowed:.3e})"
            )
