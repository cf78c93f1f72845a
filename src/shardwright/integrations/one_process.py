"""Loops that know nothing of several processes: on every rank the same one runs, and only its model is split.

Libraries look into the environment, find several processes, and would deal out batches and average gradients themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

_SEVERAL: tuple[str, ...] = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_SIZE", "PMI_RANK")
_SEVERAL = (*_SEVERAL, *(f"{mpi}_COMM_WORLD_{what}" for mpi in ("OMPI", "MV2") for what in ("SIZE", "RANK")))


@contextmanager
def one_process() -> Iterator[None]:
    """Meanwhile the environment does not speak of several processes."""
    before = {name: os.environ.pop(name) for name in _SEVERAL if name in os.environ}
    if torch.cuda.is_available() and dist.is_initialized() and dist.get_backend() != "gloo":
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", f"cuda:{torch.cuda.current_device()}")  # not the first of all
    try:
        yield
    finally:
        os.environ.update(before)
