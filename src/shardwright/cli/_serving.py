"""What ``shardwright plan --inference`` asks for, and what it shows beside the usual table."""

from __future__ import annotations

from typing import Any

from shardwright.cli._show import console, seconds_text
from shardwright.errors import ShardwrightError


def check_serving(inference: bool, objective: str | None, cache: int, others: bool) -> None:
    """Refuse what means nothing without ``--inference``, and questions that only training plans answer."""
    if not inference and (objective is not None or cache):
        raise ShardwrightError("--objective and --cache are about inference.", "Say --inference too.")
    if inference and others:
        raise ShardwrightError(
            "--stages, --microbatches, --devices, --max-batch, --frontier and a second --cluster are about training.",
            "Leave them out, or leave out --inference.",
        )


def print_serving(found: Any) -> None:
    """What the plan is for, in a sentence."""
    from shardwright.planner.sizing import batch_and_tokens

    serving, seconds = found.serving, found.prediction.step_seconds
    rows = batch_and_tokens(found.graph())[0]
    rate = f", {rows / seconds:,.0f} rows a second"
    together = f"{serving.calls} calls at once" if serving.calls > 1 else "one call"
    cache = f" with {serving.cache} positions in the cache" if serving.cache else ""
    console.print(
        f"Inference for {serving.objective}: {together}{cache} in {seconds_text(seconds)}{rate}. "
        "Results lie as the plan cuts them; what is asked for whole is put together when first used."
    )
