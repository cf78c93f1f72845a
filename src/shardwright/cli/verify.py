"""``shardwright verify``: does the plan compute the same numbers as one process?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli._options import (
    CutOption,
    ForbidOption,
    MaxAxesOption,
    MemoryOption,
    MicrobatchesOption,
    PinOption,
    RecomputeOption,
    ScheduleOption,
    StagesOption,
    check_numbers,
    pipelining,
)
from shardwright.cli._show import bytes_text, console, print_json, progress, table

if TYPE_CHECKING:
    from shardwright.verification import Verification, Verified


def verify(
    model: Annotated[str, typer.Argument(help="gpt:small, gpt:layers=2,width=64, hf:gpt2:small, file.py:function")],
    cluster: Annotated[str, typer.Option(help="local:2, local:4: as many processes are started")] = "local:2",
    search: Annotated[str, typer.Option(help="auto, or a strategy by name: data-parallel, fsdp, megatron, …")] = "auto",
    plan: Annotated[Path | None, typer.Option(help="Verify this plan file instead of making a plan")] = None,
    max_axes: MaxAxesOption = 2,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    memory: MemoryOption = None,
    recompute: RecomputeOption = "auto",
    stages: StagesOption = None,
    microbatches: MicrobatchesOption = None,
    schedule: ScheduleOption = "auto",
    cut: CutOption = None,
    batch: Annotated[int | None, typer.Option(help="Batch size (the model's default otherwise)")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length, for models that have one")] = None,
    steps: Annotated[int, typer.Option(help="AdamW steps to train", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="float64 (within 1e-9), float32 (the model's own), or both")] = "both",
    forced: Annotated[
        bool,
        typer.Option("--forced/--plan-only", help="Also verify what is forced to cut, recompute and run in stages"),
    ] = True,
    inference: Annotated[
        bool,
        typer.Option("--inference", help="Call it in evaluation mode instead of training it: compare what it returns"),
    ] = False,
    cache: Annotated[int, typer.Option(help="With --inference: positions in the cache of a Hugging Face decoder")] = 0,
    seconds: Annotated[float, typer.Option(help="Give up after so many seconds")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Train MODEL for a few steps on local processes and on one, and compare every number.

    Losses, outputs, gradients, updated parameters and buffers must equal, on every rank, those of the unmodified model in
    one process: within 1e-9 in float64; in float32 no further from float64 than four times what one process is in
    float32, step by step. Every pass has another batch, one step adds up two passes, losses are scaled, and one process is
    given the random numbers that the others draw. Small models are fastest uncut, so beside the found plan strategies are
    verified that cut the batch, features, the sequence, reductions and halos wherever that is possible, that recompute
    blocks, and that run in two stages. Exit status 0 only when all agree.

    Example: shardwright verify gpt:small --cluster local:4 --search fsdp --dtype float64

    A pipeline: shardwright verify gpt:small --cluster local:4 --stages 2 --microbatches 4 --schedule zb-h1
    """
    import functools

    from shardwright.errors import ShardwrightError
    from shardwright.planner import Options
    from shardwright.plans import Plan
    from shardwright.search.strategies import check_name
    from shardwright.verification import verify as run
    from shardwright.verification.verify import DTYPES

    check_numbers(seconds=seconds, max_axes=max_axes, memory=memory)
    check_name(search)
    joint = stages == "auto"
    asked = pipelining(stages, microbatches, schedule, cut or [])
    options = Options(
        max_axes=max_axes,
        memory_limit=None if memory is None else memory * 1e9,
        pins=pin or (),
        forbidden=forbid or (),
        recompute=recompute,
    )
    if dtype not in DTYPES:
        raise ShardwrightError(f"Verification in {dtype!r} is not possible.", f"Choose one of {', '.join(DTYPES)}.")
    planned = (cluster, search, max_axes, recompute, schedule) != ("local:2", "auto", 2, "auto", "auto")
    if plan is not None and (planned or any((pin, forbid, memory, stages, microbatches, cut))):
        raise ShardwrightError(
            "--plan says what to run; --cluster, --search, --stages and their like say what to plan.",
            "Leave out one or the other.",
        )
    if inference and (joint or asked is not None):
        raise ShardwrightError("--stages and --microbatches are about training.", "Leave them out, or --inference.")
    if Path(model).suffix == ".json" and Path(model).is_file():
        named = Plan.load(model).model or "MODEL"
        raise ShardwrightError(f"{model!r} is a plan, not a model.", f"Say: shardwright verify {named} --plan {model}")
    given = Plan.load(plan) if plan is not None else None
    if given is not None:
        batch, seq = batch or given.batch, seq or given.sequence
        if given.serving is not None:
            inference, cache = True, given.serving.cache
    with progress(as_json) as say:
        build = functools.partial(_built, model, batch, seq, inference, cache)
        answer = run(
            build,
            cluster=cluster,
            search=search,
            options=options,
            stages="auto" if joint else asked,
            steps=steps,
            dtype=dtype,
            seconds=seconds,
            plan=given,
            forced=forced,
            inference=inference,
            progress=say,
        )
    if as_json:
        print_json({"model": model, **answer.as_dict()})
    else:
        _print(model, answer)
    if not (answer.agrees and answer.cuts):
        raise typer.Exit(1)


def _built(
    reference: str, batch: int | None, seq: int | None, inference: bool, cache: int
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Module-level, so that every process can build the model for itself."""
    from shardwright.zoo.reference import resolve

    resolved = resolve(reference, batch=batch, seq=seq, device="cpu", inference=inference, cache=cache)
    return resolved.model, resolved.args, resolved.kwargs


def _print(model: str, answer: Verified) -> None:
    rows = [_row(run) for run in answer.runs]
    first = answer.runs[0]
    caption = f"Loss {first.losses[0]:.6g} → {first.losses[-1]:.6g}. "
    caption += "".join(f"{text}. " for text in (*answer.compared, *answer.changes))
    if any(item.kink for run in answer.runs for item in run.comparisons):
        caption += (
            "Some gradients jump within one rounding of the parameters, and stand on the other side than float64."
        )
    table(
        f"{model}: {answer.plan.search} on {answer.plan.shape} against one process",
        ["strategy", "dtype", "cut", "sent", "numbers", "closest", "verdict"],
        rows,
        caption=f"{_closest(answer)} {caption.strip()}",
    )
    for run in answer.runs:
        for item in [item for item in run.comparisons if not item.agrees][:10]:
            about = f"{run.name} ({run.dtype}), {item.what} {item.name}"
            console.print(f"[red]differs[/red] {about}: {item.difference:.3e} (allowed {item.allowed:.3e})")
    if not answer.cuts:
        console.print("[red]nothing was cut[/red]: no operator of this model can be, so that nothing is verified.")


def _row(run: Verification) -> list[str]:
    sent = sum(size for _, size in run.communication.values())
    cut = f"{run.cut.operators} of {run.cut.of}" if run.cut is not None else "by stages"
    verdict = "agree" if run.agrees else "DIFFER"
    return [run.name, run.dtype, cut, bytes_text(sent), str(len(run.comparisons)), _distance(run), verdict]


def _distance(run: Verification) -> str:
    """How far the number closest to its limit is from one process."""
    closest = run.closest()
    if not closest.difference:
        return "equal"
    return f"{closest.times:.1f} ×" if closest.yardstick else f"{closest.relative:.1e}"


def _closest(answer: Verified) -> str:
    """What the column says, and which number comes closest of all in the first run."""
    first, single = answer.runs[0], any(run.closest().yardstick for run in answer.runs)
    named = first.closest()
    return (
        "Cut: operators; sent: by a rank in a step; closest: how far the number closest to its limit is from one process, "
        "relative"
        + (" (× the error of one process in float32)" if single else "")
        + f"; of the first run, {named.what} {named.name}."
    )
