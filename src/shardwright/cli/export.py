"""``shardwright export``: a plan as another engine's configuration, or as code on plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli._plans import ModelOption, TrustOption, load_with_graph
from shardwright.cli._show import bytes_text, console, mesh_text, print_json, progress, seconds_text, table

if TYPE_CHECKING:
    from shardwright.exchange.exporting import Export


def export(
    plan: Annotated[Path, typer.Argument(help="A plan written by `shardwright plan … -o plan.json`")],
    to: Annotated[str, typer.Option(help="torchtitan, megatron, deepspeed, accelerate, hf, or pytorch (code)")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the file here")] = None,
    base: Annotated[
        Path | None, typer.Option(help="Start from this file of theirs: only what differs is changed")
    ] = None,
    price: Annotated[bool, typer.Option(help="Simulate what the file says, read back")] = True,
    model: ModelOption = None,
    trust: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Write PLAN as another engine's configuration, list what is lost on the way, and price that loss.

    The file says the nearest that the engine can run on the same devices with the same rows a step. It is read back,
    planned and simulated, so that its step stands beside the plan's own.

    Example: shardwright export plan.json --to torchtitan -o job.toml

    In a file of yours, changing only what differs: shardwright export plan.json --to megatron --base run.sh -o new.sh

    As code that runs without Shardwright: shardwright export plan.json --to pytorch -o parallelize.py
    """
    from shardwright import exchange
    from shardwright.files import check_writable

    check_writable(output)
    with progress(as_json) as say:
        say("reading the plan")
        loaded, graph = load_with_graph(plan, model, trust)
        exported = exchange.export(loaded, to=to, base=base, graph=graph, price=price, progress=say)
    if output is not None:
        exported.save(output)
    if as_json:
        print_json(exported.as_dict())
        return
    _print(exported, plan)
    if output is not None:
        console.print(f"written to {output}", markup=False)
    else:
        console.print(f"\n{exported.file_name} (-o writes it):\n", markup=False)
        print(exported.text, end="")


def _print(exported: Export, path: Path) -> None:
    rows = []
    first = exported.plan.prediction.step_seconds
    named = [(path.name, exported.plan), *([(exported.engine, exported.priced)] if exported.priced else [])]
    for name, one in named:
        p, stages = one.prediction, len(one.stages)
        shape = mesh_text([("stage", stages)] * (stages > 1) + [*one.stages[0].strategy.axes])
        ratio = f"{p.step_seconds / first:.3f}×" if first else "–"
        row = [name, shape, seconds_text(p.step_seconds), ratio, bytes_text(p.memory_bytes)]
        rows.append([*row, "yes" if p.fits else "no"])
    console.print(f"{exported.engine}: {exported.configuration.summary()}", markup=False, highlight=False)
    table(f"{path.name} and its export", ["plan", "mesh", "step", "ratio", "memory", "fits"], rows, spare=("mesh",))
    if exported.refusal:
        console.print(f"What was written could not be priced: {exported.refusal}", markup=False, highlight=False)
    for title, remarks in (("Lost on the way", exported.lost), ("Said elsewhere", exported.unsaid)):
        if remarks:
            console.print(f"{title}:")
            for remark in remarks:
                console.print(f"  {remark}", markup=False, highlight=False)
    if not exported.lost:
        console.print("Nothing of the plan is lost on the way.")
    if exported.price_seconds is not None:
        more = "more" if exported.price_seconds >= 0 else "less"
        console.print(f"Predicted price: {seconds_text(abs(exported.price_seconds))} {more} a step.", highlight=False)
