"""When a rank dies, what the others have in memory is kept: they write it down as they end, and whoever comes back reads it.

A collective that a rank is missing from fails on the others, or the job's agent ends them (SIGTERM): either way each writes
its parts of parameters, buffers and optimizer state, as they were after the last whole step, beside the checkpoints. Where
the parts of one step together are everything (replicas over a data axis hold the same), that step is resumed under whatever
plan runs then, and no step is lost; otherwise the last checkpoint is. A rank that ends in the middle of an update or of a
move writes nothing, and parts of different steps or different starts of a job are never put together.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import local_of
from shardwright.program.transfers import Region, parcels_between, region_of
from shardwright.runtime import recut
from shardwright.runtime.module import ParallelModule

FOLDER = "survived"
PLAIN = (bool, int, float, str, type(None))
Part = dict[str, Any]
"""Of one tensor on one rank: its region, its values, and the optimizer state that lies as it does."""


class Survivor:
    """One rank of a job: what it would write if it had to end now."""

    def __init__(self, folder: Path, step: int, model: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.step, self._model, self._optimizer = folder, step, model, optimizer
        self._whole, self._written = True, False
        self._hooks = [
            optimizer.register_step_pre_hook(self._begins),
            optimizer.register_step_post_hook(self._ended),
        ]
        self._remember()

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begins(self, *_: Any) -> None:
        self._whole = False

    def _ended(self, *_: Any) -> None:
        self.step, self._whole = self.step + 1, True
        self._remember()

    def _remember(self) -> None:
        """What a step changes before it is over: buffers, which are replaced and not written into, and random numbers."""
        self._random = torch.get_rng_state()
        self._buffers = {b.tensor: self._held(b.tensor) for b in self._model.graph.buffers}

    def _held(self, tensor: str) -> Any:
        place, key = self._model._home.get(tensor, ({}, ""))
        return place.get(key)

    def write(self) -> None:
        """Write this rank's parts, whole or not at all; nothing where they are in the middle of something."""
        if self._written or not self._whole or recut.under_way:
            return
        self._written = True
        rank, lies = dist.get_rank(), self._model._stages.resting()
        groups = self._optimizer.param_groups
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        parts: dict[str, Part] = {}
        for name, resting in lies.items():
            held = self._buffers.get(name, self._held(name))
            if held is None or rank not in resting.regions:
                continue
            state = self._optimizer.state.get(held, {}) if isinstance(held, torch.nn.Parameter) else {}
            like = {k: local_of(v).detach().cpu() for k, v in state.items() if isinstance(v, DTensor)}
            parts[name] = {
                "region": resting.regions[rank],
                "value": local_of(held).detach().cpu(),
                "like": like,
                "plain": {k: v for k, v in state.items() if k not in like},
                "group": group_of.get(id(held)),
            }
        told = [{k: v for k, v in group.items() if isinstance(v, PLAIN)} for group in groups]
        written = {"parts": parts, "groups": told, "random": self._random}
        self.folder.mkdir(parents=True, exist_ok=True)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        path = self.folder / f"{self.step}-{start}-{rank}.pt"
        torch.save(written, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)


_here: list[Survivor] = []


def survive(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """From now on this process writes down what it has when it must end; ``step`` was the last that is stored."""
    if optimizer is None or not isinstance(model, ParallelModule):
        return
    if not _here:
        _write_at_the_end()
    for other in _here:
        other.leave()
    _here[:] = [Survivor(folder / FOLDER, step, model, optimizer)]


def _write_at_the_end() -> None:
    shown, ended = sys.excepthook, signal.getsignal(signal.SIGTERM)

    def failed(*error: Any) -> None:
        shown(*error)
        for survivor in _here:
            survivor.write()

    def told_to_end(number: int, frame: Any) -> None:
        if any(survivor._written for survivor in _here):
            return  # in the middle of writing: it ends by itself
        for survivor in _here:
            survivor.write()
        signal.signal(signal.SIGTERM, ended if callable(ended) else signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    sys.excepthook = failed
    signal.signal(signal.SIGTERM, told_to_end)


def resume(folder: Path, after: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int | None:
    """The step that was resumed from what survived, if that is everything and later than ``after``; all ranks call this."""
    if optimizer is None or not isinstance(model, ParallelModule):
        return None
    told: list[tuple[int, list[str]] | None] = [None]
    if dist.get_rank() == 0:
        told = [_latest(folder / FOLDER, after, model)]
    dist.broadcast_object_list(told)
    if told[0] is None:
        return None
    step, names = told[0]
    _restore([_read(folder / FOLDER / name) for name in names], model, optimizer)
    dist.barrier()
    return step


def forget(folder: Path) -> None:
    """A checkpoint is newer than whatever survived."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return read


def _latest(folder: Path, after: int, model: ParallelModule) -> tuple[int, list[str]] | None:
    """The last step of which everything survived, and the files that hold it."""
    sets: dict[tuple[int, int], list[str]] = {}
    for path in sorted(folder.glob("*-*-*.pt")):
        number, start, _ = map(int, path.stem.split("-"))
        sets.setdefault((number, start), []).append(path.name)
    shapes = {name: model.graph.tensors[name].shape for name in model._stages.resting()}
    for (step, _), names in sorted(sets.items(), reverse=True):
        parts = [_read(folder / name)["parts"] for name in names] if step > after else []
        known = {name: [part[name]["region"] for part in parts if name in part] for name in shapes}
        if parts and all(covers(known[name], shape) for name, shape in shapes.items()):
            return step, names
    return None


def covers(regions: Iterable[Region], shape: Sequence[int]) -> bool:
    """Whether these parts are all of a tensor: one of them is, or all together are without overlapping.

    >>> covers([((0, 2),), ((2, 4),), ((2, 4),)], [4]), covers([((0, 3),), ((2, 4),)], [4]), covers([((0, 2),)], [4])
    (True, False, False)
    """
    distinct = {tuple(map(tuple, region)) for region in regions}
    if tuple((0, extent) for extent in shape) in distinct:
        return True
    apart = all(
        any(b <= c or d <= a for (a, b), (c, d) in zip(one, other, strict=True))
        for one in distinct
        for other in distinct
        if one != other
    )
    return apart and sum(prod(b - a for a, b in region) for region in distinct) == prod(shape)


def _restore(written: list[dict[str, Any]], model: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
    """Every rank puts its parts together from those that survived."""
    rank = dist.get_rank()
    for name, resting in model._stages.resting().items():
        place, key = model._home.get(name, ({}, ""))
        if rank not in resting.regions or key not in place:
            continue
        held, wanted = place[key], resting.regions[rank]
        known = [one["parts"][name] for one in written if name in one["parts"]]
        with torch.no_grad():
            local_of(held).copy_(_put_together(known, wanted, lambda part: part["value"]))
        if not isinstance(held, torch.nn.Parameter) or not (known[0]["like"] or known[0]["plain"]):
            continue
        state = dict(known[0]["plain"])
        for what in known[0]["like"]:
            local = _put_together(known, wanted, lambda part, what=what: part["like"][what]).to(held.device)
            state[what] = resting.shown(local, model.graph.tensors[name].shape, always=True)
        optimizer.state[held] = state
    for group, known in zip(optimizer.param_groups, written[0]["groups"], strict=False):
        group.update(known)
    torch.set_rng_state(written[0]["random"])


def _put_together(parts: Sequence[Part], wanted: Region, values: Any) -> Tensor:
    """One region of a tensor from parts of it."""
    have: Mapping[int, Region] = {number: tuple(map(tuple, part["region"])) for number, part in enumerate(parts)}
    new = torch.empty([b - a for a, b in wanted], dtype=values(parts[0]).dtype)
    for parcel in parcels_between(have, {len(parts): wanted}):
        region_of(new, parcel.put).copy_(region_of(values(parts[parcel.source]), parcel.take))
    return new
