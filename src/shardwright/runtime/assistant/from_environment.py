"""An assistant that ``shardwright run --assist`` asks for, by the environment of the job."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.errors import RunError
from shardwright.runtime.assistant.events import log
from shardwright.runtime.assistant.starting import EVENTS_VARIABLE, assist, check_mode
from shardwright.runtime.module import ParallelModule

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
