"""Checksums of a checkpoint: a bit that flips on a disk or on its way is a sentence, not a weight.

Every entry (one rank's part of one tensor, or a value) has a CRC-32 of its bytes in its file; so has ``.metadata``, which
says where entries are. They stand in ``checksums.json`` beside it. A rank reads back what it has just written, from the page
cache; reading looks at the entries that a rank needs, and no others. CRC-32 finds every error of up to 32 bits in a row
and, of others, all but one in four thousand million; against people it is no protection.
"""

from __future__ import annotations

import json
import logging
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwright.errors import RunError
from shardwright.files import parse_json, read_text, write
from shardwright.records import read_record

FILE = "checksums.json"
FORMAT = "shardwright-checksums-1"
CHECKED = "checksums"
"""The entry by which a checkpoint says that it has a file of checksums, so that a lost one is noticed."""
INSTEAD = "Remove this checkpoint to use the one before it."
_PART = 1 << 24
"""Bytes read back at a time."""
_log = logging.getLogger("shardwright")


@dataclass(frozen=True)
class _Document:
    """The file: of each entry its file, where it begins, how long it is, and its checksum."""

    format: str
    metadata: int
    entries: tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class _Summed:
    """Where an entry was stored, and its checksum, on the way to the rank that writes the metadata."""

    place: Any
    sum: int


class SummingWriter(dcp.FileSystemWriter):
    """PyTorch's writer, which adds the checksums."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        summed: Future[list[WriteResult]] = Future()
        summed.set_result([replace(one, storage_data=_Summed(one.storage_data, self._sum(one))) for one in written])
        return summed

    def _sum(self, written: WriteResult) -> int:
        place, found = written.storage_data, 0
        with open(self._folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            left = place.length
            while left and (part := file.read(min(left, _PART))):
                found, left = zlib.crc32(part, found), left - len(part)
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        entries = [
            (
                one.storage_data.place.relative_path,
                one.storage_data.place.offset,
                one.storage_data.place.length,
                one.storage_data.sum,
            )
            for ranks in results
            for one in ranks
        ]
        plain = [[replace(one, storage_data=one.storage_data.place) for one in ranks] for ranks in results]
        super().finish(metadata, plain)
        about = zlib.crc32((self._folder / ".metadata").read_bytes())
        write(self._folder / FILE, json.dumps({"format": FORMAT, "metadata": about, "entries": entries}))


class Checksums:
    """The checksums of one checkpoint."""

    def __init__(self, folder: str | Path, document: _Document) -> None:
        self._folder, self._metadata = folder, document.metadata
        self._entries = {(file, offset): (length, found) for file, offset, length, found in document.entries}

    def check_metadata(self, data: bytes) -> None:
        if zlib.crc32(data) != self._metadata:
            raise _damaged(self._folder, ".metadata is")

    def check_entry(self, name: str, file: str, offset: int, data: bytes) -> None:
        """Refuse an entry whose bytes are not those that were written."""
        if self._entries.get((file, offset)) != (len(data), zlib.crc32(data)):
            raise _damaged(self._folder, f"{name} in {file} is")


def read_sums(folder: str | Path) -> Checksums | None:
    """The checksums of a checkpoint; none where it was written without."""
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        data = parse_json(read_text(path, RunError), repr(str(path)), RunError)
    except RunError as error:
        raise RunError(error.message, INSTEAD) from None
    document = read_record(_Document, data, where=f"{str(path)!r} is damaged", error=RunError, remedy=INSTEAD)
    if document.format != FORMAT:
        raise RunError(f"{str(path)!r} is damaged, or of a later format than {FORMAT!r}.", INSTEAD)
    return Checksums(folder, document)


def say_unchecked(folder: str | Path) -> None:
    """One line, from one rank, about a checkpoint without checksums."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning(
            "%s has no checksums: damage in it may go unnoticed. Checkpoints saved from now on have them.", folder
        )


def _damaged(folder: str | Path, what: str) -> RunError:
    return RunError(f"The checkpoint {folder} is damaged: {what} not what was written (another checksum).", INSTEAD)
