"""``shardwright check``: does somebody's own parallel training code train as one process does?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli._options import check_numbers
from shardwright.cli._show import console, print_json, progress, table

if TYPE_CHECKING:
    from shardwright.verification.candidates import Checked


def check(
    model: Annotated[str, typer.Option(help="The plain model: gpt:small, hf:gpt2:small, file.py:function")],
    candidate: Annotated[str, typer.Option(help="file.py:function that makes the parallel module of the model")],
    processes: Annotated[int, typer.Option("-n", "--processes", help="Local processes to run it on", min=1)] = 4,
    batch: Annotated[int | None, typer.Option(help="Batch size of all ranks together (the model's otherwise)")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length, for models that have one")] = None,
    steps: Annotated[int, typer.Option(help="Steps to train", min=1)] = 3,
    even_labels: Annotated[
        bool, typer.Option("--even-labels", help="Leave labels as they are (otherwise some are ignored, unevenly)")
    ] = False,
    seconds: Annotated[float, typer.Option(help="End ranks that have not finished after so many seconds")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Train with somebody's own parallel code on local processes and without it on one, and compare every number.

    CANDIDATE is a function of the model, called on every rank inside a process group: DDP, FSDP2, tensor parallelism,
    pipelines, by any library or by hand. It returns the parallel module, or a shardwright.testing.Candidate where it has a
    training loop of its own (docs/checking.md). Losses, gradients, updates and buffers must be those of one process within
    1e-9 in float64, copies on several ranks equal, dropout alike on replicas and only there. What differs first is named,
    with the likely cause. Exit status 0 only when all agree.

    Example: shardwright check --model gpt:small --candidate train.py:build -n 4

    In your own tests: shardwright.testing.assert_same_as_one_process(build_model, build, processes=4)
    """
    import functools

    from shardwright.verification.candidates import check_candidate
    from shardwright.zoo.reference import function_from

    check_numbers(seconds=seconds)
    function_from(candidate)  # what is wrong with the name is said before any process starts
    with progress(as_json) as say:
        say(f"training {steps} steps on {processes} processes and on one")
        checked = check_candidate(
            functools.partial(_built, model, batch, seq),
            functools.partial(_candidate, candidate),
            processes=processes,
            steps=steps,
            seconds=seconds,
            uneven_labels=not even_labels,
        )
    if as_json:
        print_json({"model": model, "candidate": candidate, **checked.as_dict()})
    else:
        _print(model, candidate, checked)
    if not checked.agrees:
        raise typer.Exit(1)


def _built(reference: str, batch: int | None, seq: int | None) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Module-level, so that every process can build the model for itself."""
    from shardwright.zoo.reference import resolve

    resolved = resolve(reference, batch=batch, seq=seq, device="cpu")
    return resolved.model, resolved.args, resolved.kwargs


def _candidate(reference: str, model: Any) -> Any:
    from shardwright.zoo.reference import function_from

    return function_from(reference)(model)


def _print(model: str, candidate: str, checked: Checked) -> None:
    kinds: dict[str, list[Any]] = {}
    for item in checked.verification.comparisons:
        kinds.setdefault(item.what, []).append(item)
    rows = []
    for what, items in kinds.items():
        wrong = [item for item in items if not item.agrees]
        worst = max(items, key=lambda item: (not item.agrees, item.relative))
        where = f"{worst.relative:.1e} ({worst.name})" if worst.difference else "equal"
        rows.append([what, str(len(items)), str(len(wrong)), where, "DIFFER" if wrong else "agree"])
    losses = checked.verification.losses
    caption = f"Loss {losses[0]:.6g} → {losses[-1]:.6g}. " + "".join(
        f"{text.rstrip('.')}. " for text in checked.compared
    )
    table(
        f"{candidate} on {checked.processes} processes against one: {model}",
        ["numbers", "compared", "differ", "largest relative difference", "verdict"],
        rows,
        caption=caption.strip(),
    )
    for finding in checked.findings:
        cause = f"[red]{finding.cause}[/red]: " if finding.cause else ""
        console.print(f"{cause}{finding.sentence}")
