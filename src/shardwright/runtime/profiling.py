"""One step of a running job, recorded: ``shardwright run --profile`` writes it, ``shardwright report --measured`` reads it.

The first steps are not typical (memory is allocated, kernels are compiled), so recording begins at a later forward pass and
ends at the one after it: forward, backward and the update between them. torch.profiler does the recording; rank 0 writes it
as a Chrome trace.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist

PROFILE_VARIABLE = "SHARDWRIGHT_PROFILE"
WARM_STEPS = 3
"""Forward passes before the one that is recorded."""


def profile_if_asked(module: torch.nn.Module) -> None:
    """Record one step of ``module`` where the environment names a file for it; only rank 0 does."""
    path = os.environ.get(PROFILE_VARIABLE)
    if path and (not dist.is_initialized() or dist.get_rank() == 0):
        _Recording(path).attach(module)


class _Recording:
    def __init__(self, path: str) -> None:
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
            self.profiler.export_chrome_trace(self.path)
            self.hook.remove()
