"""``shardwright.assist``, and an assistant that ``shardwright run --assist`` asks for by the environment of the job."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.errors import RunError
from shardwright.runtime.assistant.assistant import Assistant, Mode
from shardwright.runtime.assistant.events import log
from shardwright.runtime.assistant.watching import Rule
from shardwright.runtime.module import ParallelModule

EVENTS_VARIABLE = "SHARDWRIGHT_ASSIST_EVENTS"


def assist(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    mode: Mode = "act",
    rule: Rule | None = None,
    events: str | Path | None = None,
) -> Assistant:
    """Watch the steps of a parallelized model and move work away from ranks that have become slower, and back.

    Called alike on every rank, after ``parallelize``. Losses, gradients and parameters stay those of one process: only
    who computes what of the next batch changes, between two steps. Rows of the batch move where a plan cuts it and uses
    parameters whole; parts of cut loops, with their parameters and optimizer state, where it cuts those (tensor
    parallelism); blocks between stages in a pipeline.

    Parameters
    ----------
    model
        What :func:`shardwright.parallelize` gave.
    optimizer
        Its state moves with parameters. A step is over when it has been called; without one, every forward pass in
        training begins a step, and only rows of the batch can move.
    mode
        ``"act"``, or ``"watch"``, which only tells what could be moved.
    rule
        When a move is worth making (:class:`~shardwright.runtime.assistant.watching.Rule`).
    events
        A file for one JSON object per decision (and one observation a second), written by rank 0.

    Examples
    --------
    >>> model = shardwright.parallelize(model, plan)                      # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(model.parameters())                 # doctest: +SKIP
    >>> assistant = shardwright.assist(model, optimizer)                  # doctest: +SKIP
    """
    if not isinstance(model, ParallelModule):
        raise RunError(
            f"A {type(model).__name__} is not a parallelized module.",
            "Call assist() with what shardwright.parallelize() gave.",
        )
    check_mode(mode)
    path = events if events is not None else os.environ.get(EVENTS_VARIABLE)
    return Assistant(model, optimizer, mode, rule or Rule(), None if path is None else Path(path))


def check_mode(mode: str) -> None:
    if mode not in ("act", "watch"):
        raise RunError(f"The assistant cannot {mode!r}.", "Its mode is 'act' or 'watch'.")


ASSIST_VARIABLE = "SHARDWRIGHT_ASSIST"


def ask_for(mode: str | None, events: Path | None) -> dict[str, str]:
    """What the environment of a job says so that its modules are assisted.

    >>> ask_for("watch", None)
    {'SHARDWRIGHT_ASSIST': 'watch'}
    """
    if mode is None:
        if events is not None:
            raise RunError("There are no events without an assistant.", "Add --assist, or --assist=watch.")
        return {}
    check_mode(mode)
    return {ASSIST_VARIABLE: mode} | ({} if events is None else {EVENTS_VARIABLE: str(events.resolve())})


def assist_if_asked(model: ParallelModule) -> None:
    """Start an assistant where ``shardwright run --assist`` asked for one, when an optimizer has made its first step with
    the model's parameters; where none can help, the job goes on without."""
    mode = os.environ.get(ASSIST_VARIABLE)
    if mode is None:
        return

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        own = {id(parameter) for parameter in model.parameters()} if not found else set()
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return
        found.append(optimizer)  # hooks cannot be removed while they are called
        try:
            assist(model, optimizer, mode=mode)  # type: ignore[arg-type]  # checked there
        except RunError as error:
            if dist.get_rank() == 0:
                log.warning("shardwright: no assistant: %s", error.message)

    found: list[torch.optim.Optimizer] = []
    register_optimizer_step_post_hook(stepped)
