"""Reading a ``torch.distributed.checkpoint`` directory that somebody else may have written, without running anything of it.

PyTorch's reader unpickles the directory's ``.metadata`` and every entry that is no tensor, and a pickle can call any
function. Here the metadata is read into inert values (:mod:`~shardwright.runtime.checkpoint_pickles`) and built anew from
those that make sense (:mod:`~shardwright.runtime.checkpoint_metadata`), values are read with ``weights_only``, and every
entry is held against its checksum (:mod:`~shardwright.runtime.checkpoint_sums`). What is damaged, torn or crafted is one
sentence.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardwright.errors import RunError, ShardwrightError
from shardwright.files import read_bytes
from shardwright.runtime.checkpoint_metadata import metadata_from
from shardwright.runtime.checkpoint_sums import CHECKED, INSTEAD, Checksums, read_sums, say_unchecked


def read_metadata(folder: str | Path) -> parts.Metadata:
    """The ``.metadata`` of a checkpoint directory, checked."""
    return _read(folder)[0]


def _read(folder: str | Path) -> tuple[parts.Metadata, Checksums | None]:
    path = Path(folder) / ".metadata"
    data, sums = read_bytes(path, RunError), read_sums(folder)
    if sums is not None:
        sums.check_metadata(data)
    try:
        metadata = metadata_from(data)
    except ValueError as error:
        raise RunError(f"{str(path)!r} is damaged: {error}.", INSTEAD) from None
    if sums is None and CHECKED in metadata.state_dict_metadata:
        raise RunError(f"The checkpoint {folder} is damaged: its checksums are gone.", INSTEAD)
    return metadata, sums


class _Reader(dcp.FileSystemReader):
    """PyTorch's reader, with metadata that was read before, and entries that are what was written."""

    def __init__(self, folder: str, metadata: parts.Metadata, sums: Checksums | None) -> None:
        super().__init__(folder)
        self._metadata, self._sums, self._folder = metadata, sums, Path(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> parts.Metadata:
        self._metadata.storage_meta = parts.StorageMeta(load_id=self.load_id)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in sorted(plan.items, key=lambda item: self._place(item)[:2]):
            name, (file, offset, length) = item.storage_index.fqn, self._place(item)
            with open(self._folder / file, "rb") as opened:
                opened.seek(offset)
                data = opened.read(length)
            if self._sums is not None:
                self._sums.check_entry(name, file, offset, data)
            if len(data) < length:
                raise RunError(f"The checkpoint {self._folder} cannot be read: {file} ends within {name}.", INSTEAD)
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(data))
            else:
                self._fill(item, planner, data)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> tuple[str, int, int]:
        stored = self._metadata.storage_data[item.storage_index]
        return stored.relative_path, stored.offset, stored.length

    def _fill(self, item: ReadItem, planner: LoadPlanner, data: bytes) -> None:
        index = item.storage_index
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        entry = self._metadata.state_dict_metadata[index.fqn]
        sizes = next((c.sizes for c in getattr(entry, "chunks", ()) if c.offsets == (index.offset or c.offsets)), None)
        dtype = entry.properties.dtype if isinstance(entry, parts.TensorStorageMetadata) else None
        if not isinstance(tensor, torch.Tensor) or tensor.shape != sizes or tensor.dtype != dtype:
            raise RunError(f"The checkpoint {self._folder} is damaged: {index.fqn} is not what it says.", INSTEAD)
        for dim, (start, count) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, count)
        target = planner.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            raise ValueError(f"size mismatch of {index.fqn}: {list(target.size())} and {list(tensor.size())}")
        target.copy_(tensor)
        planner.commit_tensor(item, target)


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
        metadata, sums = _read(folder)
        if sums is None:
            say_unchecked(folder)
        reader = _Reader(str(folder), metadata, sums)
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
        raise RunError(f"The checkpoint {folder} cannot be read: {why}.", INSTEAD) from error
