"""Clipping by the global norm, with one small reduction per mesh axis.

Every rank squares what it holds; a shard counts once, a replica is divided by the number of ranks that hold it, so one sum
over all ranks is the square of the whole norm. The result is the number one device computes, and it is the same on every
rank bit for bit. In a pipeline every rank takes part, also one that trains nothing (:mod:`~shardwright.runtime.norms`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import local_of
from shardwright.runtime.norms import norm_of_all, stages_of


def clip_gradients(model: torch.nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their common 2-norm is at most ``max_norm``; gives the norm before.

    Examples
    --------
    >>> loss.backward(); clip_gradients(model, 1.0); optimizer.step()         # doctest: +SKIP
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    stages = stages_of(model)
    norm = norm_of_all(gradients, stages, 2.0) if stages else _norm(gradients)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = local_of(gradient)
        local.mul_(scale.to(local.dtype))
    return norm.to(local_of(gradients[0]).dtype) if gradients else norm.to(torch.get_default_dtype())


def _norm(gradients: list[Tensor]) -> Tensor:
    """Of gradients that lie on one mesh."""
    device = local_of(gradients[0]).device if gradients else None
    square = torch.zeros((), dtype=torch.float64, device=device)
    mesh = None
    for gradient in gradients:
        holders = 1
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            for axis, placement in enumerate(gradient.placements):
                holders *= 1 if placement.is_shard() else mesh.size(axis)
        square += local_of(gradient).to(torch.float64).pow(2).sum() / holders
    if mesh is not None:
        for axis in range(mesh.ndim):
            dist.all_reduce(square, group=mesh.get_group(axis))
    return square.sqrt()
