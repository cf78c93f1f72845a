"""Reading a ``torch.distributed.checkpoint`` directory that somebody else may have written, without running anything of it.

PyTorch's reader unpickles the directory's ``.metadata`` and every entry that is no tensor, and a pickle can call any
function. Here the metadata goes through an unpickler that knows the dozen classes such a file is made of and no others,
its entries must lie inside the directory, and values are read with ``weights_only``. What is damaged, torn or
crafted is one sentence.
"""

from __future__ import annotations

import enum
import io
import pathlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.api import CheckpointException

from shardwright._torch_compat import checkpoint_metadata_parts
from shardwright.errors import RunError, ShardwrightError
from shardwright.files import read_bytes
from shardwright.records import shown

_StorageInfo, *_OTHERS = checkpoint_metadata_parts()
_PUBLIC = (
    parts.Metadata,
    parts.TensorStorageMetadata,
    parts.BytesStorageMetadata,
    parts.ChunkStorageMetadata,
    parts.TensorProperties,
    parts.MetadataIndex,
    parts.StorageMeta,
)
_CLASSES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind for kind in (*_PUBLIC, _StorageInfo, *_OTHERS)
} | {
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): dict,
    **{
        (module, prefix + kind): getattr(pathlib, "Pure" + kind)  # where it was written; nothing is looked up there
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "WindowsPath")
        for prefix in ("", "Pure")
    },
}


def _member(kind: Any, name: str) -> Any:
    """A member of an enumeration by its name: Python 3.11.0 to 3.11.3 write them as ``getattr``; no other use of that is
    allowed."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise RunError(
            "The checkpoint's metadata names 'builtins.getattr', which no checkpoint needs.",
            "Do not use this checkpoint unless you know who wrote it, and why.",
        )
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """Builds what checkpoints' metadata is made of, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = _CLASSES.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise RunError(
                f"The checkpoint's metadata names {shown(f'{module}.{name}')}, which no checkpoint needs.",
                "Do not use this checkpoint unless you know who wrote it, and why.",
            )
        return found


def read_metadata(folder: str | Path) -> parts.Metadata:
    """The ``.metadata`` of a checkpoint directory, checked."""
    path = Path(folder) / ".metadata"
    try:
        data = _Unpickler(io.BytesIO(read_bytes(path, RunError))).load()
        _check(data)
    except ShardwrightError:
        raise
    except Exception as error:  # a torn pickle may fail in any way
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(
            f"{str(path)!r} is damaged: {why}.", "Remove this checkpoint to use the one before it."
        ) from None
    return data


def _check(data: Any) -> None:
    """The types that the reader relies on, and no way out of the directory."""
    if not isinstance(data, parts.Metadata):
        raise ValueError(f"it holds a {type(data).__name__}")
    for name, entry in data.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, parts.TensorStorageMetadata | parts.BytesStorageMetadata):
            raise ValueError(f"the entry {name!r} is a {type(entry).__name__}")
        if isinstance(entry, parts.TensorStorageMetadata):
            extents = [entry.size, *(part for chunk in entry.chunks for part in (chunk.offsets, chunk.sizes))]
            typed = all(isinstance(extent, torch.Size) and len(extent) == len(entry.size) for extent in extents)
            if not typed or not isinstance(entry.properties.dtype, torch.dtype):
                raise ValueError(f"the tensor {name!r} has no sensible shape or dtype")
    for index, stored in data.storage_data.items():
        if not isinstance(index, parts.MetadataIndex) or not isinstance(stored, _StorageInfo):
            raise ValueError(f"{type(index).__name__} is stored as {type(stored).__name__}")
        numbers = (
            type(stored.offset) is int and type(stored.length) is int and stored.offset >= 0 and stored.length >= 0
        )
        if not isinstance(stored.relative_path, str) or not numbers:
            raise ValueError(f"{index.fqn!r} has no sensible place")
        if stored.relative_path in (".", "..") or set(stored.relative_path) & set("/\\\0"):
            raise ValueError(f"{index.fqn!r} is said to lie outside of the directory, in {stored.relative_path!r}")
        if getattr(stored, "transform_descriptors", None):
            raise ValueError(f"{index.fqn!r} is stored transformed, by {stored.transform_descriptors!r}")


class _Reader(dcp.FileSystemReader):
    """PyTorch's reader, with metadata that was read before."""

    def __init__(self, folder: str, metadata: parts.Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> parts.Metadata:
        self._metadata.storage_meta = parts.StorageMeta(load_id=self.load_id)
        return self._metadata


class _Planner(dcp.DefaultLoadPlanner):
    """PyTorch's planner, except that values which are no tensors are plain ones."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


def load(state: dict[str, Any], folder: str | Path) -> None:
    """Fill ``state`` from a checkpoint directory; every rank calls this."""
    with _in_words(folder):
        reader = _Reader(str(folder), read_metadata(folder))
        dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=not dist.is_initialized())


@contextmanager
def _in_words(folder: str | Path) -> Iterator[None]:
    """Whatever goes wrong inside, on whichever rank, as one sentence."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:
            cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, ShardwrightError):
            raise RunError(cause.message, cause.remedy) from None
        missing = isinstance(cause, KeyError | ValueError) or "Missing key" in str(cause) or "mismatch" in str(cause)
        why = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        if missing:
            raise RunError(
                f"The checkpoint {folder} does not fit this model: {why}.",
                "Resume the model (and the kind of optimizer) that wrote it; its plan and number of ranks may differ.",
            ) from error
        raise RunError(
            f"The checkpoint {folder} cannot be read: {why}.", "Remove it to use the one before it."
        ) from error
