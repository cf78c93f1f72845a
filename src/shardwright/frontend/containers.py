"""Lets ``torch.export`` open containers it does not know, in inputs and outputs: dataclasses, named tuples, other objects.

Each class is registered with PyTorch's tree utilities under its import path when it is first seen, so that the structure of
a call can be written into a graph as JSON. Outputs are seen by a hook on the model, before export looks at them. An object
that holds tensors in its attributes, such as a Hugging Face ``DynamicCache``, is opened too: what holds tensors are its
leaves, what can be written down is remembered beside them.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shardwright._torch_compat import (
    is_registered_node,
    load_tree,
    names_in_tree,
    register_dataclass,
    register_namedtuple,
    register_object,
)
from shardwright.errors import CaptureError

_PLAIN = (bool, int, float, str, type(None))


def register_containers(value: Any) -> None:
    """Register every dataclass, named tuple and object with tensors inside ``value`` that export could not open."""
    if isinstance(value, tuple | list):
        items: list[Any] = list(value)
    elif isinstance(value, dict):
        items = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif is_object(value):
        items = list(vars(value).values())
    else:
        return
    _register(type(value))
    for item in items:
        register_containers(item)


def restored_tree(text: str) -> Any:
    """The structure a graph remembers, in a process that may not have met its classes: they are imported and registered."""
    for name in names_in_tree(text):
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                _register(_imported(f"{'.'.join(parts[:cut])}:{'.'.join(parts[cut:])}"))
                break
            except (ImportError, AttributeError):
                continue
    return load_tree(text)


def _register(kind: Any) -> None:
    if is_registered_node(kind) or issubclass(kind, list | dict) or kind is tuple:
        return
    if issubclass(kind, tuple):
        if hasattr(kind, "_fields"):
            register_namedtuple(kind)
    elif dataclasses.is_dataclass(kind):
        register_dataclass(kind)  # type: ignore[arg-type]  # a class, not an instance
    else:
        register_object(kind, _opened, _closed)


@contextmanager
def opened_outputs(model: torch.nn.Module, everything: bool = True) -> Iterator[list[str]]:
    """While this lasts, whatever ``model`` returns has its containers registered.

    Unless ``everything`` is wanted, objects beside a loss are left out, as a training step reads the loss and lets the rest
    go: a cache for generation, switched on by default, would be kept, and cut or gathered, for nobody. The list that is
    yielded names what was left out.
    """
    left_out: list[str] = []

    def look(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not everything:
            left_out.extend(f"{key} ({type(output[key]).__name__})" for key in _idle(output))
            output = trained_on(output)
        register_containers(output)
        return output

    hook = model.register_forward_hook(look)
    try:
        yield left_out
    finally:
        hook.remove()


def trained_on(output: Any) -> Any:
    """What a training step has of ``output``: where it names a loss, all but the objects beside that."""
    idle = _idle(output)
    return type(output)(**{key: item for key, item in output.items() if key not in idle}) if idle else output


def _idle(output: Any) -> list[str]:
    if not isinstance(output, Mapping) or not _is_loss(output.get("loss")):
        return []
    return [key for key, item in output.items() if is_object(item)]


def is_object(value: Any) -> bool:
    """Whether ``value`` is an object of some class that holds tensors somewhere in its attributes."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, type, enum.Enum, *_PLAIN)) or callable(value):
        return False
    if isinstance(value, tuple | list | dict) or dataclasses.is_dataclass(value):
        return False
    return hasattr(value, "__dict__") and _holds_tensors(vars(value))


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(_holds_tensors(item) for item in value.values())
    if isinstance(value, tuple | list):
        return any(_holds_tensors(item) for item in value)
    return is_object(value)


def _opened(value: Any) -> tuple[list[Any], str]:
    """The attributes that hold tensors, and all others as JSON with the names of both."""
    inside = {name: item for name, item in vars(value).items() if _holds_tensors(item)}
    beside = {name: _written(item, value, name) for name, item in vars(value).items() if name not in inside}
    kind = type(value)
    about = {"class": f"{kind.__module__}:{kind.__qualname__}", "holds": list(inside), "beside": beside}
    return list(inside.values()), json.dumps(about, sort_keys=True)


def _closed(items: Any, about: str) -> Any:
    written = json.loads(about)
    kind = _imported(written["class"])
    value = kind.__new__(kind)
    held = dict(zip(written["holds"], items, strict=True))
    device = next((leaf.device for leaf in _tensors(list(held.values()))), torch.device("cpu"))
    vars(value).update(held)
    vars(value).update({name: _read(item, device) for name, item in written["beside"].items()})
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _imported(path: str) -> Any:
    module, _, qualified = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def _written(item: Any, owner: Any, name: str) -> Any:
    """A value without tensors, as JSON holds it."""
    if isinstance(item, _PLAIN):
        return item
    if isinstance(item, torch.dtype):
        return {"dtype": str(item).removeprefix("torch.")}
    if isinstance(item, torch.device):
        return {"device": "any"}  # where the tensors beside it are
    if isinstance(item, torch.Size):
        return {"tuple": list(item)}
    if isinstance(item, tuple | list):
        return {type(item).__name__: [_written(part, owner, name) for part in item]}
    if isinstance(item, dict):
        pairs = [[_written(key, owner, name), _written(part, owner, name)] for key, part in item.items()]
        return {"dict": pairs}
    if isinstance(item, type) and "<locals>" not in item.__qualname__:
        return {"type": f"{item.__module__}:{item.__qualname__}"}
    if hasattr(item, "__dict__") and not callable(item):
        about = {key: _written(part, owner, name) for key, part in vars(item).items()}
        return {"object": [f"{type(item).__module__}:{type(item).__qualname__}", about]}
    raise CaptureError(
        f"The model takes or returns a {type(owner).__name__} whose attribute {name!r} is a {type(item).__name__}, "
        "which cannot be written into a graph.",
        "Return tensors, numbers, or tuples, lists, dicts and dataclasses of them.",
    )


def _read(item: Any, device: torch.device) -> Any:
    if not isinstance(item, dict):
        return item
    ((kind, inner),) = item.items()
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "device":
        return device
    if kind == "type":
        return _imported(inner)
    if kind == "dict":
        return {_read(key, device): _read(part, device) for key, part in inner}
    if kind == "object":
        found = _imported(inner[0])
        value = found.__new__(found)
        vars(value).update({key: _read(part, device) for key, part in inner[1].items()})
        return value
    parts = [_read(part, device) for part in inner]
    return tuple(parts) if kind == "tuple" else parts
