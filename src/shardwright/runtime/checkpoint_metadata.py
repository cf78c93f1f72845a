"""The metadata of a checkpoint, built anew from plain values that make sense.

What the pickle named is taken for what it says only where PyTorch writes such a thing: the dozen classes of
``torch.distributed.checkpoint`` since torch 2.0, as Python 3.10 to 3.14 pickle them. Entries lie inside the directory, and
the parts of every tensor fill it, without gaps and without overlap: what is missing would stay as it was before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as parts

from shardwright._torch_compat import checkpoint_metadata_parts
from shardwright.errors import RunError
from shardwright.records import shown
from shardwright.runtime.checkpoint_pickles import Made, Named, read_pickle

_StorageInfo, _Encoding, _layout = checkpoint_metadata_parts()
_PATHS = [
    (module, prefix + kind)  # where it was written; nothing is looked up there
    for module in ("pathlib", "pathlib._local")
    for kind in ("PosixPath", "WindowsPath")
    for prefix in ("", "Pure")
]
_ENUM = Named("builtins", "getattr")
"""Python 3.11.0 to 3.11.3 write a member of an enumeration as ``getattr``; no other use of that is allowed."""


def _name(kind: Any) -> Named:
    return Named(kind.__module__, kind.__name__)


_KNOWN = frozenset(
    [
        *map(
            _name, (parts.Metadata, parts.TensorStorageMetadata, parts.BytesStorageMetadata, parts.ChunkStorageMetadata)
        ),
        *map(_name, (parts.TensorProperties, parts.MetadataIndex, parts.StorageMeta, _StorageInfo, _Encoding, _layout)),
        *(_ENUM, ("torch", "Size"), ("collections", "OrderedDict"), *_PATHS),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    ]
)


def _allowed(name: Named) -> None:
    if name not in _KNOWN:
        raise RunError(
            f"The checkpoint's metadata names {shown(str(name))}, which no checkpoint needs.",
            "Do not use this checkpoint unless you know who wrote it, and why.",
        )


def metadata_from(data: bytes) -> parts.Metadata:
    """The metadata in a pickle; a ``ValueError`` where it makes no sense, a ``RunError`` where it asks for more.

    >>> import pickle
    >>> metadata_from(pickle.dumps(parts.Metadata({"x": parts.BytesStorageMetadata()}, storage_data={}))).state_dict_metadata
    {'x': BytesStorageMetadata()}
    """
    found = _fields(read_pickle(data, _allowed), parts.Metadata, "state_dict_metadata")
    entries, stored = found["state_dict_metadata"], found.get("storage_data")
    if type(entries) is not dict or type(stored) is not dict:
        raise ValueError("it does not say what is stored where")
    version = found.get("version")
    made = parts.Metadata(
        {_text(name): _entry(_text(name), entry) for name, entry in entries.items()},
        _planner_data(found.get("planner_data")),
        {_index(index): _place(place) for index, place in stored.items()},
        version=None if version is None else _text(version),
    )
    if len(made.storage_data) != len(stored):
        raise ValueError("an entry is stored twice")
    return made


def _fields(value: Any, kind: Any, *required: str) -> dict[str, Any]:
    """The attributes of what would be an instance of a class."""
    if type(value) is not Made or value.what != _name(kind) or value.args:
        what = value.what.name if type(value) is Made else type(value).__name__
        raise ValueError(f"{what} stands where a {kind.__name__} belongs")
    state = {} if value.state is None else value.state
    if type(state) is not dict or any(name not in state for name in required):
        raise ValueError(f"a {kind.__name__} lacks what it needs")
    return state


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{shown(value)} is no name")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{shown(value)} is no size or place")
    return value


def _size(value: Any) -> torch.Size:
    given = value.args[0] if type(value) is Made and value.what == ("torch", "Size") and len(value.args) == 1 else None
    if type(given) is not tuple:
        raise ValueError("a shape is none")
    return torch.Size([_whole(extent) for extent in given])


def _entry(name: str, entry: Any) -> Any:
    if type(entry) is Made and entry.what == _name(parts.BytesStorageMetadata):
        return parts.BytesStorageMetadata()
    found = _fields(entry, parts.TensorStorageMetadata, "properties", "size", "chunks")
    if type(found["chunks"]) is not list:
        raise ValueError(f"the tensor {shown(name)} has no parts")
    properties, size = _properties(found["properties"]), _size(found["size"])
    chunks = []
    for chunk in found["chunks"]:
        about = _fields(chunk, parts.ChunkStorageMetadata, "offsets", "sizes")
        chunks.append(parts.ChunkStorageMetadata(_size(about["offsets"]), _size(about["sizes"])))
    _check_parts(name, size, chunks)
    return parts.TensorStorageMetadata(properties, size, chunks)


def _properties(value: Any) -> parts.TensorProperties:
    """The dtype; what else is written has been of no use since torch 2.0, and is only looked at."""
    if type(value) is not Made or value.what != _name(parts.TensorProperties) or type(value.state) is not tuple:
        raise ValueError("a tensor has no properties")
    if value.args or len(value.state) != 5:
        raise ValueError("a tensor has no properties")
    dtype, _, requires_grad, encoding, pinned = value.state
    if (
        type(dtype) is not Named
        or dtype.module != "torch"
        or type(requires_grad) is not bool
        or type(pinned) is not bool
    ):
        raise ValueError("a tensor has no dtype")
    _check_member(encoding)
    return parts.TensorProperties(dtype=getattr(torch, dtype.name), requires_grad=requires_grad, pin_memory=pinned)


def _check_member(value: Any) -> None:
    """A member of the enumeration of memory formats, as the several versions of Python pickle it."""
    kind = _name(_Encoding)
    if type(value) is Made and value.what == kind and len(value.args) == 1:
        return
    if type(value) is Made and value.what == _ENUM:
        if len(value.args) != 2 or value.args[0] != kind or value.args[1] not in list(_Encoding.__members__):
            raise RunError(
                "The checkpoint's metadata names 'builtins.getattr', which no checkpoint needs.",
                "Do not use this checkpoint unless you know who wrote it, and why.",
            )
        return
    raise ValueError("a tensor has no memory format")


def _check_parts(name: str, size: torch.Size, chunks: Sequence[parts.ChunkStorageMetadata]) -> None:
    """The parts fill the tensor: as many elements, none outside, no two upon each other."""
    boxes = []
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            raise ValueError(f"a part of {shown(name)} has another number of dims")
        if any(start + count > extent for start, count, extent in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError(f"a part of {shown(name)} lies outside of it")
        if math.prod(chunk.sizes):
            boxes.append([(start, start + count) for start, count in zip(chunk.offsets, chunk.sizes, strict=True)])
    if sum(math.prod(stop - start for start, stop in box) for box in boxes) != math.prod(size):
        raise ValueError(f"the parts of {shown(name)} do not fill it")
    dims = range(len(size))
    swept = max(dims, key=lambda dim: len({box[dim][0] for box in boxes}), default=0)
    open_: list[Any] = []
    for box in sorted(boxes, key=lambda box: box[swept]) if len(boxes) > 1 else ():
        open_ = [other for other in open_ if not size or other[swept][1] > box[swept][0]]
        if any(all(a[0] < b[1] and b[0] < a[1] for a, b in zip(box, other, strict=True)) for other in open_):
            raise ValueError(f"two parts of {shown(name)} overlap")
        open_.append(box)


def _index(value: Any) -> parts.MetadataIndex:
    found = _fields(value, parts.MetadataIndex, "fqn")
    offset, number = found.get("offset"), found.get("index")
    return parts.MetadataIndex(
        _text(found["fqn"]), None if offset is None else _size(offset), None if number is None else _whole(number)
    )


def _place(value: Any) -> Any:
    found = _fields(value, _StorageInfo, "relative_path", "offset", "length")
    path = _text(found["relative_path"])
    if path in ("", ".", "..") or set(path) & set("/\\\0"):
        raise ValueError(f"an entry is said to lie outside of the directory, in {shown(path)}")
    if found.get("transform_descriptors"):
        raise ValueError(f"an entry is stored transformed, by {shown(found['transform_descriptors'])}")
    return _StorageInfo(path, _whole(found["offset"]), _whole(found["length"]))


def _planner_data(value: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Where in a nested state every name belongs."""
    if value is None:
        return None
    if type(value) is not dict or not all(
        type(name) is str and type(path) is tuple and all(type(part) in (str, int) for part in path)
        for name, path in value.items()
    ):
        raise ValueError("it does not say where entries belong")
    return dict(value)
