"""Lets ``torch.export`` open containers it does not know, in inputs and outputs: dataclasses, named tuples, other objects.

Each class is registered with PyTorch's tree utilities under its import path when it is first seen, so that the structure of
a call can be written into a graph as JSON. Outputs are seen by a hook on the model, before export looks at them. An object
that holds tensors in its attributes, such as a Hugging Face ``DynamicCache``, is opened too: what holds tensors are its
leaves, what can be written down is remembered beside them. Where the model returns an object that it was given, the
result says so, and the caller's object becomes what the model made of it: loops that keep using theirs go on rightly.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
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
GIVEN = "_shardwright_given"
"""The attribute of a returned object that names the argument it was given as: a keyword, or a position as text."""


def register_containers(value: Any, given: bool = False) -> None:
    """Register every dataclass, named tuple and object with tensors inside ``value`` that export could not open.

    ``given``: these are arguments, where an object that will hold tensors may hold none yet.
    """
    if isinstance(value, tuple | list):
        items: list[Any] = list(value)
    elif isinstance(value, dict):
        items = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif is_object(value) or (given and _may_hold(value)):
        items = list(vars(value).values()) if is_object(value) else []
    else:
        return
    _register(type(value))
    for item in items:
        register_containers(item, given)


def restored_tree(text: str) -> Any:
    """The structure a graph remembers, in a process that may not have captured one: its classes are registered.

    Raises
    ------
    CaptureError
        Where this process does not have one of them.
    """
    for name in names_in_tree(text):
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                _register(known_class(f"{'.'.join(parts[:cut])}:{'.'.join(parts[cut:])}"))
                break
            except CaptureError:
                continue
    if missing := sorted(names_in_tree(text)):
        raise CaptureError(
            f"The graph names the class {missing[0]!r}, which this process does not have.", "Import its module first."
        )
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
def opened_outputs(model: torch.nn.Module, everything: bool = True) -> Iterator[tuple[list[str], list[str]]]:
    """While this lasts, whatever ``model`` returns has its containers registered.

    Unless ``everything`` is wanted, objects beside a loss are left out, as a training step reads the loss and lets the rest
    go: a cache for generation, switched on by default, would be kept, and cut or gathered, for nobody. The lists that are
    yielded name what was left out, and the arguments that the model returns.
    """
    left_out: list[str] = []
    given: list[str] = []
    before: dict[str, list[torch.Tensor]] = {}

    def remember(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        before.update({name: list(_tensors(value)) for name, value in _objects(args, kwargs)})

    def look(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        returned = list(_inside(output))
        for name, value in _objects(args, kwargs):
            now = list(_tensors(value))
            changed = [id(tensor) for tensor in now] != [id(tensor) for tensor in before[name]]
            if any(value is item for item in returned):
                vars(value)[GIVEN] = name
                given.append(name)
            elif changed:
                raise CaptureError(
                    f"The model changes its argument {name!r} (a {type(value).__name__}) and does not return it.",
                    "Let the model return it (use_cache=True for a cache), or give it none.",
                )
        if not everything:
            left_out.extend(f"{key} ({type(output[key]).__name__})" for key in _idle(output))
            output = trained_on(output)
        register_containers(output)
        return output

    hooks = [
        model.register_forward_pre_hook(remember, with_kwargs=True),
        model.register_forward_hook(look, with_kwargs=True),
    ]
    try:
        yield left_out, given
    finally:
        for hook in hooks:
            hook.remove()


def hand_back(output: Any, arguments: Mapping[str, Any]) -> None:
    """Let objects that a call was given be what the model made of them; ``arguments`` by keyword and by position as text."""
    for value in _inside(output):
        name = vars(value).pop(GIVEN, None)
        if name is not None and name in arguments:
            arguments[name].__dict__ = vars(value)  # one state for both, whichever the loop goes on with


def _objects(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments that are objects of the caller's, opened for the capture."""
    for name, value in (*((str(place), value) for place, value in enumerate(args)), *kwargs.items()):
        if _may_hold(value) and is_registered_node(type(value)):
            yield name, value


def _inside(value: Any) -> Iterator[Any]:
    """The objects that a result holds."""
    if isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _inside([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif is_object(value):
        yield value


def trained_on(output: Any) -> Any:
    """What a training step has of ``output``: where it names a loss, all but the objects beside that."""
    idle = _idle(output)
    return type(output)(**{key: item for key, item in output.items() if key not in idle}) if idle else output


def _idle(output: Any) -> list[str]:
    if not isinstance(output, Mapping) or not _is_loss(output.get("loss")):
        return []
    return [key for key, item in output.items() if is_object(item) and GIVEN not in vars(item)]


def is_object(value: Any) -> bool:
    """Whether ``value`` is an object of some class that holds tensors somewhere in its attributes."""
    return _may_hold(value) and _holds_tensors(vars(value))


def _may_hold(value: Any) -> bool:
    """Whether ``value`` is an object with attributes, and none of those that everybody knows."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, type, enum.Enum, *_PLAIN)) or callable(value):
        return False
    if isinstance(value, tuple | list | dict) or dataclasses.is_dataclass(value):
        return False
    return hasattr(value, "__dict__")


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
    kind = known_class(written["class"])
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
    elif is_object(value):
        yield from _tensors(vars(value))


def known_class(path: str) -> Any:
    """The class ``module:Name`` of a module that this process has imported; nothing is imported, for graphs come from
    files. A process that has the model has its classes.

    >>> known_class("collections:OrderedDict")
    <class 'collections.OrderedDict'>
    """
    module, _, qualified = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise CaptureError(
            f"The graph names the class {path!r}, which this process does not have.", "Import its module first."
        )
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
        return known_class(inner)
    if kind == "dict":
        return {_read(key, device): _read(part, device) for key, part in inner}
    if kind == "object":
        found = known_class(inner[0])
        value = found.__new__(found)
        vars(value).update({key: _read(part, device) for key, part in inner[1].items()})
        return value
    parts = [_read(part, device) for part in inner]
    return tuple(parts) if kind == "tuple" else parts
