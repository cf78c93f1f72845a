"""Lets ``torch.export`` open containers it does not know: dataclasses and named tuples in inputs and outputs.

Each is registered with PyTorch's tree utilities under its import path when it is first seen, so that the structure of
a call can be written into a graph as JSON. Outputs are seen by a hook on the model, before export looks at them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright._torch_compat import is_registered_node, register_dataclass, register_namedtuple


def register_containers(value: Any) -> None:
    """Register every dataclass and named tuple inside ``value`` that export could not open."""
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        if not is_registered_node(kind):
            register_namedtuple(kind)
        items: list[Any] = list(value)
    elif isinstance(value, tuple | list):
        items = list(value)
    elif isinstance(value, dict):
        items = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not is_registered_node(kind):
            register_dataclass(kind)
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return
    for item in items:
        register_containers(item)


@contextmanager
def opened_outputs(model: torch.nn.Module) -> Iterator[None]:
    """While this lasts, whatever ``model`` returns has its containers registered."""
    hook = model.register_forward_hook(lambda module, args, output: register_containers(output))
    try:
        yield
    finally:
        hook.remove()
