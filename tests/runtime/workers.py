"""Functions that run in the worker pool: models are built once per process and kept."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.frontend import capture
from shardwright.verification.precision import all_double
from shardwright.verification.prepare import widened, without_dropout
from shardwright.zoo.reference import resolve
from shardwright.zoo.wide_resnet import WideResNet


@functools.lru_cache(maxsize=4)
def built(reference: str, double: bool = True) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """A model with its inputs and its graph."""
    torch.manual_seed(0)
    resolved = resolve(reference, device="cpu")
    model, args, kwargs = without_dropout(resolved.model), resolved.args, resolved.kwargs
    if double:
        model, args, kwargs = widened(model, args, kwargs)
    with all_double(double):
        graph = capture(model, args, kwargs)
    return model, tuple(args), kwargs, graph


@functools.lru_cache(maxsize=1)
def two_residual_blocks() -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """A wide ResNet with two of its blocks, of two kinds: what every further one would only repeat."""
    torch.manual_seed(0)
    model, args = WideResNet((1, 1), 4, 10), (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))
    model, args, kwargs = widened(model, args, {})
    with all_double(True):
        graph = capture(model, args, kwargs)
    return model, tuple(args), kwargs, graph


@functools.lru_cache(maxsize=8)
def device_mesh(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
