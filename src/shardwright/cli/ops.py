"""``shardwright ops``: the operators it knows, a check of every rule, and how much of real models they cover."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

HUGGING_FACE = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "resnet")


def ops(
    names: Annotated[list[str] | None, typer.Argument(help="Only operators that contain one of these words.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run every rule: whole against split into 2, 3 and 4.")
    ] = False,
    coverage: Annotated[bool, typer.Option("--coverage", help="Count what real models use, by origin.")] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Models to cover, such as gpt or hf:bert; the zoo and seven others if none."),
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Write the coverage as a Markdown document.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List operators with their loops and where each rule comes from; check them; count how far they reach.

    Examples: shardwright ops softmax · shardwright ops --check · shardwright ops --coverage --write docs/operators.md
    """
    if check:
        _check(names or [], as_json)
    elif coverage:
        _coverage(model or [], write, as_json)
    else:
        _list(names or [], as_json)


def _list(names: list[str], as_json: bool) -> None:
    from shardwright.cli._show import print_json, table
    from shardwright.verification.listing import listing

    found = listing(names)
    if as_json:
        print_json([entry.__dict__ for entry in found])
        return
    rows = [[e.target, e.kind, e.origin, "; ".join(e.loops)] for e in found]
    table("Operators", ["operator", "kind", "origin", "loops of a sample call"], rows, f"{len(found)} operators")


def _check(names: list[str], as_json: bool) -> None:
    from shardwright.cli._show import console, print_json
    from shardwright.verification.auditing import audit

    result = audit(names, progress=not as_json)
    data: dict[str, Any] = {k: v for k, v in result.__dict__.items() if k != "disagreement"}
    if as_json:
        print_json(data | {"disagreement": result.disagreement and str(result.disagreement)})
    else:
        console.print(
            f"{result.runs} splits run, of {result.rules} rules in {result.calls} calls of {result.operators} operators"
        )
        if result.disagreement is not None:
            console.print(str(result.disagreement), style="bold red", markup=False)
        else:
            console.print("every rule agrees with the whole operator, forward and backward")
    if result.disagreement is not None:
        raise typer.Exit(1)


def _coverage(models: list[str], write: Path | None, as_json: bool) -> None:
    from shardwright.cli._show import console, print_json, table
    from shardwright.files import check_writable
    from shardwright.files import write as write_file
    from shardwright.frontend import capture
    from shardwright.operators.coverage import ORIGINS, cover, markdown
    from shardwright.zoo import ENTRIES
    from shardwright.zoo.reference import resolve

    check_writable(write)
    chosen = models or [*ENTRIES, *(f"hf:{name}" for name in HUGGING_FACE)]
    covered = []
    for name in chosen:
        found = resolve(name)
        covered.append(cover(name, capture(found.model, found.args, found.kwargs)))
    if write is not None:
        write_file(write, markdown(covered, "shardwright ops --coverage --write docs/operators.md"))
    if as_json:
        print_json([c.__dict__ | {"share": c.share} for c in covered])
        return
    rows = [
        [c.model, str(c.instances), *(str(c.counts.get(o, 0)) for o in ORIGINS), f"{100 * c.share:.1f} %"]
        for c in covered
    ]
    table("Coverage", ["model", "instances", *ORIGINS, "covered"], rows)
    if write is not None:
        console.print(f"written to {write}")
