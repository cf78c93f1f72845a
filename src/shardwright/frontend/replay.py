"""Runs a captured graph with PyTorch on one device, operator by operator: the proof that capture changed nothing.

Parameters and buffers come from a live module, so gradients arrive where ``loss.backward()`` of the module would put
them. Nothing here is fast; the runtime executes plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright._torch_compat import flatten_tree, operator, schema, unflatten_tree
from shardwright.errors import CaptureError
from shardwright.frontend.containers import hand_back, restored_tree
from shardwright.graph import Atom, Constant, Graph, Op, Ref, Value

_VIEWS = ("aten.view.default", "aten._unsafe_view.default")


def replay(
    graph: Graph, model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """What ``model(*args, **kwargs)`` returns, computed by ``graph`` with the parameters and buffers of ``model``.

    Buffers the graph changes are changed in ``model`` too.

    >>> from shardwright.frontend import capture
    >>> graph = capture(model, (x,))
    >>> assert torch.equal(replay(graph, model, (x,)), model(x))
    """
    values: dict[str, Any] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    paths = {buffer.tensor: buffer.path for buffer in graph.buffers}
    for parameter in graph.parameters:
        values[parameter.tensor] = parameters[parameter.paths[0]]
    for buffer in graph.buffers:
        values[buffer.tensor] = buffers[buffer.path].clone()  # autograd keeps it; the original changes below
    leaves, _ = flatten_tree((tuple(args), dict(kwargs or {})))
    if len(leaves) != len(graph.inputs):
        raise CaptureError(
            f"The graph was captured with {len(graph.inputs)} inputs, this call has {len(leaves)}.",
            "Give inputs of the same structure.",
        )
    for given, leaf in zip(graph.inputs, leaves, strict=True):
        if given.tensor is not None:
            values[given.tensor] = leaf
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
    values = values_of(graph, values, device)
    with torch.no_grad():
        for held, fresh in graph.mutations:
            buffers[paths[held]].copy_(values[fresh].detach())
    flat_outputs = [_value(output, values, device) for output in graph.outputs]
    if not graph.output_tree:
        return flat_outputs
    output = unflatten_tree(flat_outputs, restored_tree(graph.output_tree))
    hand_back(output, {**{str(place): value for place, value in enumerate(args)}, **(kwargs or {})})
    return output


def value_of(constant: Constant, graph: Graph) -> Tensor:
    """A tensor that is written into the model's code; one without elements has no bytes to be read."""
    tensor = graph.tensors[constant.tensor]
    dtype = getattr(torch, tensor.dtype)
    data = bytearray(constant.data)
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(tensor.shape)


def values_of(graph: Graph, given: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Every tensor of a graph by its name, computed from those that are given."""
    values = dict(given)
    for constant in graph.constants:
        values[constant.tensor] = value_of(constant, graph).to(device)
    for op in graph.ops:
        with torch.set_grad_enabled(op.grad and torch.is_grad_enabled()):
            _run(op, values, device)
    return values


def _run(op: Op, values: dict[str, Any], device: torch.device) -> None:
    kwargs = {key: _value(value, values, device) for key, value in op.kwargs}
    if any(argument.name == "device" for argument in schema(op.target).arguments) and not op.inputs:
        kwargs["device"] = device
    # Kernels may lay out a result in memory otherwise than the trace foresaw, where only a reshape is sure to work.
    target = "aten.reshape.default" if op.target in _VIEWS else op.target
    result = operator(target)(*(_value(value, values, device) for value in op.args), **kwargs)
    results = result if isinstance(result, tuple | list) else (result,)
    for name, item in zip(op.outputs, results, strict=True):
        if name is not None:
            values[name] = item


def _value(value: Value, values: dict[str, Any], device: torch.device) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, tuple):
        return [_value(item, values, device) for item in value]
    if isinstance(value, Atom):
        if value.kind == "device":
            return device
        return complex(value.value) if value.kind == "complex" else getattr(torch, value.value)
    return value
