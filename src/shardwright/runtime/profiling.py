"""One step of a running job, recorded: ``shardwright run --profile`` writes it, ``shardwright report --measured`` reads it.

The first steps are not typical (memory is allocated, backward passes are traced), so recording begins at a later forward
pass and ends at the one after it: forward, backward and the update between them. torch.profiler does the recording. Rank 0
writes a Chrome trace; of a pipeline, whose ranks do different things, every rank does, beside it. Whatever profiler runs,
instructions and passes appear in it under their names (:mod:`~shardwright.program.naming`).
"""

from __future__ import annotations

import atexit
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright._torch_compat import profiler_runs
from shardwright.runtime.executor import TRACED_AFTER

PROFILE_VARIABLE = "SHARDWRIGHT_PROFILE"
WARM_STEPS = TRACED_AFTER + 1
"""Forward passes before the one that is recorded: it is the first that runs what was traced in the one before it."""


def profile_if_asked(module: torch.nn.Module, every_rank: bool = False) -> None:
    """Record one step of ``module`` where the environment names a file for it: on rank 0, or on every rank."""
    path = os.environ.get(PROFILE_VARIABLE)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if path and (every_rank or rank == 0):
        _Recording(trace_path(path, rank)).attach(module)


def trace_path(path: str | Path, rank: int) -> Path:
    """Where a rank writes: rank 0 the file that was named, others beside it.

    >>> trace_path("trace.json", 3).name
    'trace.rank3.json'
    """
    path = Path(path)
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def named(text: str) -> AbstractContextManager[Any]:
    """What happens inside has this name in a profile, if one is being made."""
    return torch.profiler.record_function(text) if profiler_runs() else nullcontext()


class _Recording:
    def __init__(self, path: Path) -> None:
        self.path, self.passes = path, 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler: Any = torch.profiler.profile(activities=activities)
        self.running = False

    def attach(self, module: torch.nn.Module) -> None:
        self.hook = module.register_forward_pre_hook(self.before)
        atexit.register(self.finish)

    def before(self, module: torch.nn.Module, args: Any) -> None:
        """Called before every forward pass."""
        self.passes += 1
        if self.running:
            self.finish()
        elif self.passes == WARM_STEPS + 1:
            self.running = True
            self.profiler.start()

    def finish(self) -> None:
        """Stop and write; at the end of the script where no further forward pass came."""
        if self.running:
            self.running = False
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))
            self.hook.remove()
