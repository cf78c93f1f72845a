"""Functions that run in the worker pool: models are built once per process and kept."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.verification.prepare import all_double, widened, without_dropout
from shardwright.zoo.reference import resolve
from shardwright.zoo.wide_resnet import WideResNet


def captured(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Graph:
    """The model's graph. In a pool one process captures and all have it: their models are the same, and so is what they
    would find. Not for tests of what ranks capture."""
    if not (dist.is_initialized() and dist.get_backend() == "gloo"):
        return capture(model, args, kwargs)
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [capture(model, args, kwargs)]
        except Exception as error:  # for all: nobody may wait for a graph that never comes
            answer = [error]
    dist.broadcast_object_list(answer, 0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]


@functools.lru_cache(maxsize=4)
def built(reference: str, double: bool = True) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """A model with its inputs and its graph."""
    torch.manual_seed(0)
    resolved = resolve(reference, device="cpu")
    model, args, kwargs = without_dropout(resolved.model), resolved.args, resolved.kwargs
    if double:
        model, args, kwargs = widened(model, args, kwargs)
    with all_double(double):
        graph = captured(model, args, kwargs)
    return model, tuple(args), kwargs, graph


@functools.lru_cache(maxsize=1)
def two_residual_blocks() -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """A wide ResNet with two of its blocks, of two kinds: what every further one would only repeat."""
    torch.manual_seed(0)
    model, args = WideResNet((1, 1), 4, 10), (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))
    model, args, kwargs = widened(model, args, {})
    with all_double(True):
        graph = captured(model, args, kwargs)
    return model, tuple(args), kwargs, graph


@functools.lru_cache(maxsize=8)
def device_mesh(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
