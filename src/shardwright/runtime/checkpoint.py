"""Checkpoints that any plan can resume: written whole or not at all.

A checkpoint is a ``torch.distributed.checkpoint`` directory. Parameters and optimizer state are DTensors under the
model's own names, so each rank writes its shards and another plan, with another number of ranks, reads the regions it
needs. A checkpoint is written into ``step-N.partial`` and renamed to ``step-N`` when every rank has written its part; the
rename is atomic, hence a directory called ``step-N`` is complete however the job ended. Where one of that name is replaced,
the old one waits under ``step-N.replaced`` and counts until the new one has its name. Reading runs nothing that a
checkpoint holds (:mod:`shardwright.runtime.checkpoint_reading`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardwright._torch_compat import local_of
from shardwright.errors import RunError
from shardwright.files import parse_json
from shardwright.lowering.randomness import random_state, set_random_state
from shardwright.runtime.checkpoint_reading import load, read_metadata
from shardwright.runtime.checkpoint_sums import CHECKED, SummingWriter
from shardwright.runtime.replanning import ELASTIC_VARIABLE
from shardwright.runtime.submodules import names_elsewhere
from shardwright.runtime.weights import check_names

# Optimizer state under the names of the parameters, so that it does not depend on how they are grouped or numbered.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
_COMPLETE = re.compile(r"step-(\d{1,18})(\.replaced)?")
_LEFT_BEHIND = ("step-*.partial", "step-*.removed")


def save_checkpoint(
    folder: str | Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write ``folder/step-N``; every rank calls this. ``extra`` holds small plain values (an epoch, a data position).

    The ``keep`` latest checkpoints stay, older ones are removed.

    Examples
    --------
    >>> save_checkpoint("checkpoints", step, model, optimizer)                # doctest: +SKIP
    """
    folder = Path(folder)
    final, partial = folder / f"step-{step}", folder / f"step-{step}.partial"
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (path for pattern in _LEFT_BEHIND for path in folder.glob(pattern)):  # by a killed job
            shutil.rmtree(old, ignore_errors=True)
    _meet()
    state = _state(model, optimizer)
    state |= _drawn(model, _rank())
    state["extra"] = json.dumps({"step": step, **(extra or {})})
    state[CHECKED] = "CRC-32"
    try:
        dcp.save(state, storage_writer=SummingWriter(partial), no_dist=not dist.is_initialized())
    except (dcp.CheckpointException, OSError, RuntimeError) as problem:  # every rank is told of the failure of any
        raise RunError(
            f"The checkpoint {str(final)!r} cannot be written: {_why(problem)}.",
            "Free space on that disk or name another folder; the checkpoints before stay.",
        ) from problem
    _meet()
    if first:
        replaced = final.with_suffix(".replaced")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(final, replaced)
        os.replace(partial, final)
        _sync(folder)
        _remove(replaced)
        for old in checkpoints(folder)[:-keep]:
            _remove(old)
    if _elastic():
        from shardwright.runtime.survivors import forget, survive

        if first:
            forget(folder)
        if not extra:  # nobody else could say what those values are some steps later
            survive(folder, step, model, optimizer)
    _meet()
    return final


def load_checkpoint(
    folder: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any] | None:
    """Resume from the latest complete checkpoint in ``folder``; ``None`` where there is none, else its ``extra`` values.

    In a job started with ``shardwright run --elastic``, where a later step survived in the memory of the ranks that did not
    die (:mod:`shardwright.runtime.survivors`), that step is resumed.

    Examples
    --------
    >>> resumed = load_checkpoint("checkpoints", model, optimizer)            # doctest: +SKIP
    >>> start = resumed["step"] if resumed else 0                             # doctest: +SKIP
    """
    extra = _loaded(latest(folder), model, optimizer)
    known = {"step": 0} if extra is None else extra
    if _elastic() and known.keys() == {"step"}:
        from shardwright.runtime.survivors import resume, survive

        survived = resume(Path(folder), known["step"], model, optimizer)
        extra = extra if survived is None else {"step": survived}
        survive(Path(folder), (extra or known)["step"], model, optimizer)
    return extra


def _why(problem: BaseException) -> str:
    """The first reason in a failure to save: the operating system's words where it has some."""
    if isinstance(problem, dcp.CheckpointException) and problem.failures:
        rank, (cause, _) = min(problem.failures.items())
        return f"rank {rank}: {_why(cause)}" if len(problem.failures) > 1 or rank else _why(cause)
    told = getattr(problem, "strerror", None) or str(problem)
    return (told.strip().splitlines() or [type(problem).__name__])[0].rstrip(".")


def _loaded(
    found: Path | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any] | None:
    """What a checkpoint says about itself, once model and optimizer have what it holds."""
    if found is None:
        return None
    state = _state(model, optimizer)
    drawn = _known_of(found, _drawn(model, _rank()), _drawn(model, 0), {"random": torch.get_rng_state()})
    state |= {**drawn, "extra": ""}
    load(state, found)
    extra = parse_json(str(state["extra"]), f"what {found} says about itself", RunError)
    if not isinstance(extra, dict):
        raise RunError(f"The checkpoint {found} does not say at which step it was written.", "Use another one.")
    if state["model"]:
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=True))
    if optimizer is not None and state["model"]:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_BY_NAME)
    # The same objects, filled; a generator that the checkpoint knows nothing of stays where it is.
    device = _device(model)
    now = random_state(device)
    set_random_state((*(state[name] for name in drawn), *now[len(drawn) :])[: len(now)], device)
    return extra


def _drawn(model: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Where the generators are that a rank draws from: every rank's own, because the stages of a pipeline draw apart."""
    return {f"random.{rank}.{number}": state for number, state in enumerate(random_state(_device(model)))}


def _known_of(found: Path, own: dict[str, Any], first: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds of these: written by as many ranks as there are now, by others, or before each had its own."""
    known = read_metadata(found).state_dict_metadata
    world = dist.get_world_size() if dist.is_initialized() else 1
    alike = f"random.{world - 1}.0" in known and f"random.{world}.0" not in known
    asked = own if alike else first if "random.0.0" in known else before
    return {name: value for name, value in asked.items() if name in known}


def _device(model: torch.nn.Module) -> torch.device:
    return next((local_of(parameter).device for parameter in model.parameters()), torch.device("cpu"))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def load_weights(model: torch.nn.Module, path: str | Path, strict: bool = True) -> None:
    """Read parameters and buffers only, from a checkpoint directory of ours or from any DCP of a plain state dict.

    Names that are missing or unexpected are an error that names them, unless ``strict`` is false.
    """
    stored = {
        name: tuple(entry.size)
        for name, entry in read_metadata(path).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    own: dict[str, Any] = get_model_state_dict(model)
    nested = not set(own) <= set(stored) and any(name.startswith("model.") for name in stored)
    if nested:  # beside the model a checkpoint of ours holds what belongs to a training run
        stored = {name.removeprefix("model."): size for name, size in stored.items() if name.startswith("model.")}
    elsewhere = names_elsewhere(model)
    stored = {name: size for name, size in stored.items() if name not in elsewhere}
    check_names(path, stored, {(name,): tuple(tensor.shape) for name, tensor in own.items()}, strict)
    known = {name: tensor for name, tensor in own.items() if name in stored}
    load({"model": known} if nested else known, path)
    set_model_state_dict(model, known, options=StateDictOptions(strict=False))


def checkpoints(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first; half-written ones do not count."""
    return [path for path in _named(folder) if (path / ".metadata").is_file()]


def latest(folder: str | Path) -> Path | None:
    """The last complete checkpoint in a folder, if there is one.

    Raises
    ------
    RunError
        Where a later one has lost its ``.metadata``: training must not begin anew, or further back, without a word.
    """
    for path in reversed(_named(folder)):
        if not (path / ".metadata").is_file():
            raise RunError(
                f"The checkpoint {path} is damaged: its .metadata is gone.",
                "Remove this checkpoint to use the one before it, or to begin anew where there is none.",
            )
        return path
    return None


def _named(folder: str | Path) -> list[Path]:
    """What has the name of a complete checkpoint, oldest first; a name is given when all is written."""
    found: dict[int, Path] = {}
    for path in sorted(Path(folder).glob("step-*")):  # ``step-3`` comes before ``step-3.replaced`` and counts first
        if match := _COMPLETE.fullmatch(path.name):
            found.setdefault(int(match.group(1)), path)
    return [found[step] for step in sorted(found)]


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    if not model.state_dict():  # a rank that holds nothing: torch takes that for a mistake
        return {"model": {}, "optimizer": {}}
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    return state


def _remove(old: Path) -> None:
    """Remove a checkpoint so that no half of it ever looks whole."""
    if old.exists():
        doomed = old.with_suffix(".removed")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(old, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Let a rename outlive a crash of the machine."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _elastic() -> bool:
    return os.environ.get(ELASTIC_VARIABLE) == "1" and dist.is_initialized() and dist.get_world_size() > 1


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
