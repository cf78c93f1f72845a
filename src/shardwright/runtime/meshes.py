"""Device meshes over the ranks of a job: made once, by all ranks together."""

from __future__ import annotations

import atexit
import functools
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.errors import PlanError, RunError
from shardwright.plans import Plan

Axes = tuple[tuple[str, int], ...]

_MESHES: dict[Any, Any] = {}
"""Meshes over the default process group, which stands beside them: made once, because each of several axes costs process
groups (NCCL communicators, threads of gloo). Models may share them: whatever is sent, all ranks send in the same order."""

LETTING_GO_SECONDS, MOST_LETTING_GO_SECONDS = 0.1, 2.0
"""What gloo's threads are given at the end of the process: so long, and longer while one of them has work to do."""


def known_mesh(ranks: tuple[int, ...], axes: Axes, kind: str) -> DeviceMesh:
    """The mesh of these ranks; every rank of the job calls this, also those that are not in it."""
    key, world = (kind, ranks, axes), dist.group.WORLD
    if _MESHES.get(None) is not world:  # another job in this process: nothing of the one before is of use
        _MESHES.clear()
        _MESHES[None] = world
        _let_go_at_the_end()
    if key not in _MESHES:
        names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
        if ranks == tuple(range(dist.get_world_size())):
            _MESHES[key] = init_device_mesh(kind, sizes, mesh_dim_names=names)
        else:
            _MESHES[key] = DeviceMesh(kind, torch.tensor(ranks).reshape(sizes), mesh_dim_names=names)
    return _MESHES[key]


@functools.cache
def _let_go_at_the_end() -> None:
    """A thread of gloo's takes the interpreter's lock to let go of what its last collective held, some time after that is
    said to be over; where the interpreter has begun to end by then, it aborts a process whose work is done
    (https://github.com/pytorch/pytorch/pull/179291). So this one sleeps for a moment, last of all that is done at exit; on a
    busy machine, where a thread may have to wait for a processor, until none does."""
    if dist.get_backend() != "nccl":
        atexit.register(_let_go)


def _let_go() -> None:
    until = time.monotonic() + MOST_LETTING_GO_SECONDS
    time.sleep(LETTING_GO_SECONDS)
    while _others_run() and time.monotonic() < until:
        time.sleep(LETTING_GO_SECONDS)


def _others_run() -> bool:
    """Whether another thread of this process has a processor or waits for one; not told outside of Linux."""
    mine = threading.get_native_id()
    return any(_state(task) == "R" for task in Path("/proc/self/task").glob("*") if task.name != str(mine))


def _state(task: Path) -> str:
    """The letter behind a thread's name in its line of status; none where it has ended meanwhile."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def kind_of_device(device: torch.device | str | None) -> str:
    """What the processes compute on: ``device`` where it is given, or what their backend is for."""
    return torch.device(device).type if device is not None else ("cuda" if dist.get_backend() == "nccl" else "cpu")


def check_processes(plan: Plan, exactly: bool = True) -> None:
    """Refuse to run a plan on other processes than it is for; ``exactly``: or on more.

    Raises
    ------
    RunError, PlanError
    """
    if not dist.is_initialized():
        raise RunError(
            "torch.distributed is not initialised.",
            "Start the script with torchrun (or `shardwright run`) and call torch.distributed.init_process_group() first.",
        )
    here = dist.get_world_size()
    if plan.ranks[-1] >= here or (exactly and plan.devices != here):
        raise PlanError(
            f"The plan is for {plan.devices} processes, and {here} are running.",
            f"Start with torchrun --nproc-per-node so that there are {plan.devices} (`shardwright run` does), or plan for "
            "this number; where fewer devices were faster, `shardwright plan … --all-devices` insists on all.",
        )
