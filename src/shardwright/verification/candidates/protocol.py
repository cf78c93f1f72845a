"""What ``build(model)`` hands over: somebody's parallel module, and how it trains where that is not the usual way.

``build`` runs on every rank, inside a process group, and is given the plain model with the same weights everywhere. A bare
``nn.Module`` is enough for DistributedDataParallel, ``fully_shard`` and tensor parallelism; whoever has a loop of their own
(accumulation, a pipeline's schedule, clipping, a sharded optimizer) returns a :class:`Candidate` with those parts of it that
differ. Names, shards and their order need not be declared: every number of the model is another one, so that each part of a
weight is recognised by its values (:mod:`~shardwright.verification.candidates.recognising`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwright._torch_compat import map_tree
from shardwright.errors import RunError
from shardwright.verification.recorded import adamw, loss_of

Rows = tuple[int, int]
Parameters = Mapping[str, tuple[Tensor, "Tensor | None"]]


@dataclass
class Candidate:
    """A parallel module on one rank, and how it trains.

    Parameters
    ----------
    module
        Holds this rank's parameters and buffers, whole or in part, under any names. Stages go into an ``nn.ModuleList``.
    rows
        Which rows of a batch this rank reads, ``(which, of how many)`` equal parts, or the data-parallel ``DeviceMesh``.
        ``None``: all of them (tensor parallelism, pipelines).
    backward
        ``backward(*args, **kwargs)`` clears the gradients, goes forward and back on this rank's rows, and returns
        this rank's loss (``None`` where another rank has it). Otherwise the module is called, and its loss goes back.
    optimizer
        What ``update`` steps; one process uses the same kind with the same options. AdamW unless given.
    update
        What follows the backward pass, their clipping included. Otherwise gradients are clipped by PyTorch, if ``clip`` says
        so, and the optimizer makes a step.
    clip
        The norm to which all gradients together are clipped before an update.
    losses
        How the losses of different rows make up that of the batch: their ``"mean"`` or their ``"sum"``.
    parameters
        Where weights or gradients are not those of the module's parameters (flat shards of ZeRO, Megatron's
        ``main_grad``): a function that gives, by any names, pairs of a tensor of weights and the tensor of their
        gradients after ``backward``.
    reload
        Saves a checkpoint and loads it again; called once, after the first step.

    Examples
    --------
    >>> def build(model):                                                       # under torchrun, on every rank
    ...     fully_shard(model)
    ...     return Candidate(model, rows=(dist.get_rank(), dist.get_world_size()), clip=1.0)
    """

    module: nn.Module
    rows: Rows | DeviceMesh | None = None
    backward: Callable[..., Tensor | float | None] | None = None
    optimizer: torch.optim.Optimizer | None = None
    update: Callable[[], Any] | None = None
    clip: float | None = None
    losses: Literal["mean", "sum"] = "mean"
    parameters: Callable[[], Parameters] | None = None
    reload: Callable[[], Any] | None = None


def completed(built: Any) -> Candidate:
    """What ``build`` returned, with everything that was left out."""
    if isinstance(built, nn.Module):
        built = Candidate(built, rows=_usual_rows(built))
    if not isinstance(built, Candidate):
        raise RunError(
            f"build(model) returned {type(built).__name__}, neither a module nor a Candidate.",
            "Return the parallel nn.Module, or shardwright.testing.Candidate(module, …).",
        )
    if built.losses not in ("mean", "sum"):
        raise RunError(f"losses={built.losses!r} is not possible.", "Say losses='mean' or losses='sum'.")
    rows = built.rows
    if isinstance(rows, DeviceMesh):
        rows = (rows.get_local_rank(), rows.size())
    which, count = rows or (0, 1)
    if not 0 <= which < count:
        raise RunError(f"rows={rows} names no part of a batch.", "Say rows=(which, of how many), from 0.")
    module, optimizer, clip = built.module, built.optimizer, built.clip
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if optimizer is None and built.update is None and trained:
        optimizer = adamw(trained)

    def backward(*args: Any, **kwargs: Any) -> Tensor:
        module.zero_grad()
        loss = loss_of(module(*args, **kwargs))
        loss.backward()
        return loss.detach()

    def update() -> None:
        if clip is not None:
            clip_together(list(trained.values()), clip)
        if optimizer is not None:
            optimizer.step()

    return replace(
        built,
        rows=(which, count),
        backward=built.backward or backward,
        optimizer=optimizer,
        update=built.update or update,
        parameters=built.parameters or (lambda: {name: (p, p.grad) for name, p in module.named_parameters()}),
    )


def clip_together(parameters: Sequence[Tensor], most: float) -> None:
    """Clip by the norm of all gradients, of which PyTorch's function takes only those of one mesh at a time."""
    meshes: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [nn.utils.get_total_norm(gradients) for gradients in meshes.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    share = most / (float(torch.stack(whole).norm()) + 1e-6) if whole else 1.0
    for gradients in meshes.values():
        for gradient in gradients:
            gradient.mul_(min(1.0, share))


def _usual_rows(module: nn.Module) -> Rows | None:
    """The rows that a bare module is trained on: data parallelism shares them out to all its ranks."""
    if isinstance(module, DistributedDataParallel):
        return dist.get_rank(module.process_group), dist.get_world_size(module.process_group)
    if isinstance(module, FSDPModule):
        meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
        if any(mesh.ndim > 1 for mesh in meshes):
            raise RunError(
                "Which rows a rank reads cannot be told from a module on a mesh of several axes.",
                "Return Candidate(module, rows=mesh['dp']), the data-parallel axis (or (rank, ranks) for hybrid sharding).",
            )
        return dist.get_rank(), dist.get_world_size()
    return None


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The leading extent that most tensors of a call have."""
    extents: Counter[int] = Counter()
    map_tree(lambda leaf: extents.update([len(leaf)]) if _has_rows(leaf) else None, (tuple(args), dict(kwargs)))
    return extents.most_common(1)[0][0] if extents else 0


def own_rows(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], which: int, count: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One of ``count`` equal parts of a batch.

    >>> own_rows((torch.arange(4),), {}, 1, 2)[0]
    (tensor([2, 3]),)
    """
    size = batch_size(args, kwargs)
    if size % count:
        raise RunError(
            f"{size} rows cannot be shared out equally to {count} ranks.", f"Give --batch {count} or a multiple."
        )
    part = size // count

    def own(leaf: Any) -> Any:
        return leaf.narrow(0, which * part, part) if _has_rows(leaf) and len(leaf) == size else leaf

    cut_args, cut_kwargs = map_tree(own, (tuple(args), dict(kwargs)))
    return cut_args, cut_kwargs


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0
