"""``shardwright fits``: whether a model can be trained on a cluster, what takes the memory, what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli._like import print_remarks
from shardwright.cli._options import MemoryOption, check_numbers
from shardwright.cli._show import bytes_text, console, finite, print_json, progress, seconds_text, table

if TYPE_CHECKING:
    from shardwright.exchange import Configuration
    from shardwright.fitting import Change, Fit, Fitting

COLUMNS = {
    "params": ("parameters",),
    "grads": ("gradients",),
    "optim.": ("optimizer state",),
    "activ.": ("activations", "activation gradients"),
    "gath.": ("gathered copies",),
}
"""What the columns of the table hold; everything else is in one more."""


def fits(
    model: Annotated[str, typer.Argument(help="gpt, llama:layers=80, hf:gpt2, hf:config.json, file.py:function")],
    cluster: Annotated[str, typer.Option(help="8xH200, 4x8xA100-80GB, local:2 or a TOML file")],
    batch: Annotated[int | None, typer.Option(help="Rows of a step on all devices together")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length, for models that have one")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16: the dtype that is computed in")] = None,
    like: Annotated[
        str | None,
        typer.Option(
            help="Ask about this configuration: torchtitan's .toml, Megatron's .sh, DeepSpeed's .json, accelerate's "
            ".yaml, or hf for the model's tp_plan"
        ),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(help="Ask about this way: data-parallel, zero-1, zero-2, fsdp, megatron, fsdp+tensor"),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="adamw, momentum, sgd, or adamw-float32: mixed precision, state in float32")
    ] = "adamw",
    memory: MemoryOption = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="The step is compiled, and keeps less for backward")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Does MODEL fit on CLUSTER? Bytes of a device by kind for the usual ways to train it, and what to change if not.

    Example: shardwright fits llama:layers=80,width=8192,inner=28672 --cluster 8x8xH100 --batch 64 --dtype bfloat16

    Mixed precision: shardwright fits hf:gpt2-xl --cluster 8xA100-40GB --dtype bfloat16 --optimizer adamw-float32

    What you have: shardwright fits llama --cluster 8xH100 --like llama3_8b.toml
    """
    from dataclasses import replace
    from time import perf_counter

    from shardwright.cluster import parse_cluster
    from shardwright.cluster.calibrate import ensure_local
    from shardwright.costs.optimizer import optimizer as known_optimizer
    from shardwright.exchange import read_configuration
    from shardwright.exchange.planning import rows_asked
    from shardwright.fitting import fits_graph
    from shardwright.fitting.answering import as_one_rank
    from shardwright.fitting.ways import named_way
    from shardwright.frontend import capture
    from shardwright.planner import Options
    from shardwright.program.microbatches import batch_of
    from shardwright.zoo.reference import resolve

    check_numbers(memory=memory)
    known_optimizer(optimizer)
    told = None if like is None else read_configuration(like, model)
    with progress(as_json) as say:
        ensure_local(cluster, report=lambda share, what: say(f"measuring this machine, once: {share:.0%}, {what}"))
        where = parse_cluster(cluster)
        if search is not None:  # refused before any work
            named_way(search, where, where.size, optimizer)
        if told is not None:
            batch, seq = batch or rows_asked(told, where.size), seq or told.length
            dtype = dtype or (told.precision if told.precision != "float32" else None)
        say("building the model")
        resolved = resolve(model, batch=batch, seq=seq, dtype=dtype)
        say("capturing the model")
        began = perf_counter()
        asked, args, kwargs, ring = as_one_rank(told, resolved.args, resolved.kwargs)
        graph = capture(resolved.model, args, kwargs)
        if batch is None and batch_of(graph) < where.size:  # a row for every device is the least that all of them share
            resolved = resolve(model, batch=where.size, seq=seq, dtype=dtype)
            asked, args, kwargs, ring = as_one_rank(told, resolved.args, resolved.kwargs)
            graph = capture(resolved.model, args, kwargs)
        captured = perf_counter() - began
        options = Options(optimizer=optimizer, memory_limit=None if memory is None else memory * 1e9)
        found = fits_graph(
            graph,
            where,
            options,
            like=asked,
            search=search,
            progress=say,
            reference=resolved.name,
            ring=ring,
            compiled=compiled,
        )
    found = replace(found, captured_seconds=captured)
    if as_json:
        print_json(document(found))
    else:
        show(found, told)


def show(found: Fitting, told: Configuration | None) -> None:
    """The answer in a sentence, what takes the memory, what to change."""
    from shardwright.fitting.engines import counted

    console.print(answer(found), highlight=False, markup=False, soft_wrap=True)
    rows = [_row(fit) for fit in found.ways if not fit.refusal]
    kept = ", ".join(f"{who} {size / 1e9:.2f}" for who, size in found.reserves)
    table(
        f"{found.model or 'The model'} on {found.cluster}, {found.batch} rows a step: GB of each device",
        ["way", "peak", *COLUMNS, "other", "left", "step"],
        rows,
        caption=f"At the worst moment of each. {found.limit / 1e9:.1f} GB may be used of {found.memory / 1e9:.1f}"
        f"{f' (kept free: {kept})' if kept else ''}. activ.: activations and their gradients; gath.: gathered copies of "
        "parameters; other: temporaries, communication buffers, inputs, buffers, library workspace, the allocator's "
        "rounding.",
        spare=("step", "other"),
    )
    for fit in found.ways:
        if fit.refusal:
            console.print(f"{fit.name}: not possible: {fit.refusal}", highlight=False, markup=False)
    if found.changes:
        first = found.ways[0] if found.asked else min(found.ways, key=lambda fit: fit.bytes)
        table(
            f"What makes {first.name} fit, the cheapest first",
            ["change", "step", "costs", "peak", "left"],
            [_change(change, first) for change in found.changes],
            caption="costs: seconds of a step more than before; device-seconds on more devices.",
        )
    elif not found.fits:
        console.print("Nothing that was tried makes it fit: pipelines are searched by shardwright plan --stages auto.")
    if told is not None:
        print_remarks(told)
        if said := counted(found.ways[0].configuration, found.ring):
            console.print(said, highlight=False, markup=False)
        if most := found.ways[0].reserved:
            console.print(
                f"PyTorch's allocator takes up to {bytes_text(most)} for it where there is room (what logs call reserved).",
                highlight=False,
                markup=False,
            )
    console.print(
        f"Captured in {seconds_text(found.captured_seconds)}, answered in {seconds_text(found.seconds)}.",
        highlight=False,
    )


def answer(found: Fitting) -> str:
    """The answer in a sentence."""
    best, first = found.best, found.ways[0]
    if found.fits and best is not None:
        said = f"It fits as {best.name}: {bytes_text(best.bytes)} of {bytes_text(best.limit)}"
        said += f", {bytes_text(best.headroom)} left, {seconds_text(best.seconds)} a step."
        if found.fewest is not None and found.fewest.devices < found.devices:
            fewest = found.fewest
            such = "One such device" if fewest.devices == 1 else f"{fewest.devices} such devices"
            said += f" {such} would do: {bytes_text(fewest.bytes)}, {seconds_text(fewest.seconds)}."
        return said
    possible = [fit for fit in ([first] if found.asked else found.ways) if not fit.refusal]
    if not possible:
        return f"{first.name} is not possible: {first.refusal}"
    least = min(possible, key=lambda fit: fit.bytes)
    return f"It does not fit: {least.name} needs {bytes_text(least.bytes)}, {bytes_text(-least.headroom)} too many."


def _row(fit: Fit) -> list[str]:
    known = {name: fit.kind(*kinds) for name, kinds in COLUMNS.items()}
    other = fit.bytes - sum(known.values())
    sizes = [_gb(size) for size in known.values()]
    left = f"{fit.headroom / 1e9:.1f}" if fit.fits else f"[red]{fit.headroom / 1e9:.1f}[/]"
    return [fit.name, _gb(fit.bytes), *sizes, _gb(other), left, seconds_text(fit.seconds)]


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 5e7 else "–" if size <= 0 else "<0.1"


def _change(change: Change, first: Fit) -> list[str]:
    fit = change.fit
    what = " and ".join(change.what) + (f" ({change.otherwise})" if change.otherwise else "")
    share = fit.seconds * fit.devices / (first.seconds * first.devices) - 1
    return [what, seconds_text(fit.seconds), f"{100 * share:+.1f} %", bytes_text(fit.bytes), bytes_text(fit.headroom)]


def document(found: Fitting) -> dict[str, Any]:
    """What ``--json`` says."""
    return {
        "model": found.model,
        "cluster": found.cluster,
        "devices": found.devices,
        "batch": found.batch,
        "fits": found.fits,
        "answer": answer(found),
        "device_bytes": found.memory,
        "kept_free": dict(found.reserves),
        "usable_bytes": found.limit,
        "ways": [_fit_document(fit, found.ring) for fit in found.ways],
        "changes": [
            {"what": list(change.what), "otherwise": change.otherwise or None, "slower": change.slower}
            | _fit_document(change.fit, found.ring)
            for change in found.changes
        ],
        "fewest": None if found.fewest is None else _fit_document(found.fewest, found.ring),
        "calibration": found.calibration,
        "captured_seconds": found.captured_seconds,
        "answered_seconds": found.seconds,
    }


def _fit_document(fit: Fit, ring: int) -> dict[str, Any]:
    from shardwright.fitting.engines import counted

    return {
        "name": fit.name,
        "configuration": fit.configuration.decisions(),
        "devices": fit.devices,
        "fits": fit.fits,
        "bytes": finite(fit.bytes),
        "headroom_bytes": finite(fit.headroom),
        "step_seconds": finite(fit.seconds),
        "kinds": dict(fit.kinds),
        "during": fit.during,
        "reserved_bytes": fit.reserved,
        "counted": counted(fit.configuration, ring) or None,
        "refusal": fit.refusal or None,
    }
