"""A few steps of training, with everything a comparison needs kept: losses, gradients, parameters, buffers.

AdamW divides by the gradient's size, so rounding noise on a gradient that is zero in theory (the bias of an attention's
keys) moves a parameter by whole steps of the learning rate, and from then on two float32 runs are at different points. A
run is therefore also taken apart: :func:`retraced` computes loss and gradients on one process at the very parameters the
run had before each step, and :func:`replayed` computes what AdamW, on one process, makes of the run's gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import flatten_tree
from shardwright.errors import RunError

LEARNING_RATE = 1e-3
EPSILON = 1e-8


@dataclass
class Run:
    """What a training run leaves behind, whole tensors by their names in the model.

    ``before`` and ``gradients`` are the parameters before each step and their gradients in it, ``parameters`` and
    ``buffers`` those after the last.
    """

    losses: list[float] = field(default_factory=list)
    before: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def train(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int, keep: bool) -> Run:
    """Train with AdamW and keep what is to be compared (``keep`` is false on ranks other than 0, which only take part)."""
    run = Run()
    optimiser = _optimiser(p for p in model.parameters() if p.requires_grad)
    for _ in range(steps):
        before = _wholes(dict(model.named_parameters()))
        optimiser.zero_grad()
        loss, gradients = _step(model, args, kwargs)
        run.losses.append(loss)
        run.before.append(before if keep else {})
        run.gradients.append(gradients if keep else {})
        optimiser.step()
    parameters, buffers = _wholes(dict(model.named_parameters())), _wholes(dict(model.named_buffers()))
    if keep:
        run.parameters, run.buffers = parameters, buffers
    return run


def retraced(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run) -> Run:
    """Losses, gradients and buffers of ``model`` on this process where every step starts from the parameters of ``run``."""
    found = Run(before=run.before, parameters=run.parameters)
    for before in run.before:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
                parameter.grad = None
        loss, gradients = _step(model, args, kwargs)
        found.losses.append(loss)
        found.gradients.append(gradients)
    found.buffers = _wholes(dict(model.named_buffers()))
    return found


def replayed(start: Mapping[str, Tensor], run: Run) -> list[dict[str, Tensor]]:
    """The parameters after every step that AdamW makes, on one process, of ``start`` and the gradients of a run."""
    parameters = {name: torch.nn.Parameter(tensor.detach().clone()) for name, tensor in start.items()}
    trained = [name for name in parameters if any(name in gradients for gradients in run.gradients)]
    optimiser = _optimiser(parameters[name] for name in trained) if trained else None
    after = []
    for gradients in run.gradients:
        for name in trained:
            parameters[name].grad = gradients.get(name)
        if optimiser is not None:
            optimiser.step()
        after.append(_wholes(parameters))
    return after


def _step(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
    loss = loss_of(model(*args, **kwargs))
    loss.backward()
    value = float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach())
    return value, _wholes({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def loss_of(output: Any) -> Tensor:
    """The scalar to train on: the output itself, its ``loss``, or else the mean square of everything it holds."""
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    leaves = [leaf for leaf in flatten_tree(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    if not trained:
        raise RunError(
            "Nothing that the model returns depends on its parameters, so there is no gradient.",
            "Return a loss, or floating-point tensors to make one of.",
        )
    wholes = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in trained]
    return torch.stack([whole.pow(2).mean() for whole in wholes]).sum()


def _optimiser(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.01)


def _wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, whole on rank 0. All shards travel there at once: one by one they took a third of a verification."""
    copies = {name: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}
    cut = {name: t for name, t in tensors.items() if isinstance(t, DTensor) and not _replicated(t)}
    if not cut:
        return copies
    mine = {name: (tensor.__create_chunk_list__()[0].offsets, copies[name]) for name, tensor in cut.items()}
    shares: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, shares if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        for name, tensor in cut.items():
            blank = float("nan") if tensor.is_floating_point() else -1  # shows where no rank has anything
            copies[name] = torch.full(tensor.shape, blank, dtype=tensor.dtype)
            for offsets, piece in (share[name] for share in shares):
                spans = (slice(begin, begin + size) for begin, size in zip(offsets, piece.shape, strict=True))
                copies[name][tuple(spans)] = piece
    return copies


def _replicated(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)
