"""Reading what others wrote and writing what others will read, each in one place.

Reading: whatever is wrong with a file (absent, a folder, not text, nested ten thousand deep, a compressed bomb) is one
sentence. Writing: the new content goes beside the old file and takes its name in one move (``rename`` is atomic, POSIX), so
that a crash, a full disk or a killed process leaves the old file or the new one, whole. :func:`check_writable` asks
before minutes of work whether the answer can be written at all.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import os
import stat
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from shardwright.errors import FileError, ShardwrightError

LARGEST = 1 << 28
"""Bytes of a file, after decompression, beyond which it is not read."""
PART = 1 << 20
"""Bytes read at a time."""
LEFT_BEHIND_SECONDS = 600.0
"""How old an unfinished file must be for nobody to be writing it any more."""


def read_bytes(path: str | Path, error: type[ShardwrightError] = FileError, *, largest: int = LARGEST) -> bytes:
    """A file's content, decompressed where it is gzipped or xz; what prevents that is an ``error`` of one sentence.

    >>> read_bytes("no-such-file.json")
    Traceback (most recent call last):
        ...
    shardwright.errors.FileError: Cannot read 'no-such-file.json': No such file or directory. Check the path.
    """
    try:
        with open(path, "rb") as file:
            data = _content(file, largest)
        if data[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
                data = _content(unpacked, largest)
        elif data[:6] == b"\xfd7zXZ\x00":
            with lzma.LZMAFile(io.BytesIO(data)) as unpacked:
                data = _content(unpacked, largest)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as problem:  # ValueError: a null in the name
        why = getattr(problem, "strerror", None) or str(problem)
        raise error(f"Cannot read {str(path)!r}: {why}.", "Check the path.") from None
    if len(data) > largest:
        raise error(f"{str(path)!r} holds more than {largest} bytes.", "Is this the file that was meant?")
    return data


def _content(file: io.BufferedIOBase, largest: int) -> bytes:
    """All of it, or enough to see that it is too much; a single ``read`` of that size would allocate all of it first."""
    parts, left = list[bytes](), largest + 1
    while left > 0 and (part := file.read(min(left, PART))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_text(path: str | Path, error: type[ShardwrightError] = FileError) -> str:
    """A file's content as UTF-8 text."""
    try:
        return read_bytes(path, error).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{str(path)!r} is not text: {problem}.", "Is this the file that was meant?") from None


def read_json(path: str | Path, error: type[ShardwrightError] = FileError) -> Any:
    """The JSON value a file holds, plain or compressed."""
    return parse_json(read_text(path, error), repr(str(path)), error)


def parse_json(text: str, where: str, error: type[ShardwrightError] = FileError) -> Any:
    """The JSON value a text holds; ``where`` names the text in errors."""
    try:
        return json.loads(text)
    except ValueError as problem:  # also numbers of more digits than Python converts
        raise error(f"{where} is not JSON: {problem}.", "Write it again.") from None
    except RecursionError:
        raise error(f"{where} is nested too deeply to be read.", "Is this the file that was meant?") from None


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all; whatever stood there stays until the new content is on the disk.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "plan.json"
    >>> write(target, "{}")
    >>> target.read_text()
    '{}'
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        target = _final(path)
        if _special(target):  # a pipe or a terminal keeps no old content
            target.write_bytes(data)
            return
        _sweep(target)
        number, scratch = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".tmp", dir=target.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(scratch, _mode(target))
            os.replace(scratch, target)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as problem:
        raise _refused(path, problem) from None


def check_writable(*paths: str | Path | None) -> None:
    """Refuse, before any work is done, a path that :func:`write` could not write to; ``None`` is passed over."""
    for path in paths:
        if path is None:
            continue
        try:
            target = _final(path)
            if target.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            if _special(target):
                if not os.access(target, os.W_OK):
                    raise PermissionError(0, "permission denied")
                continue
            number, scratch = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".tmp", dir=target.parent)
            os.close(number)
            os.unlink(scratch)
        except (OSError, ValueError) as problem:
            raise _refused(path, problem) from None


def _final(path: str | Path) -> Path:
    """Where a path leads: a symbolic link stays, what it points to is replaced."""
    return Path(os.path.realpath(path))


def _special(target: Path) -> bool:
    return target.exists() and not stat.S_ISREG(target.stat().st_mode) and not target.is_dir()


def _sweep(target: Path) -> None:
    """Remove what killed processes left beside a file: content that never got its name."""
    for entry in os.scandir(target.parent):
        if entry.name.startswith(f".{target.name[:100]}.") and entry.name.endswith(".tmp"):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime > LEFT_BEHIND_SECONDS:
                    os.unlink(entry.path)


def _mode(target: Path) -> int:
    """The old file's permissions, or those a plainly opened file would get."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _refused(path: str | Path, problem: OSError | ValueError) -> FileError:
    why = getattr(problem, "strerror", None) or str(problem)
    return FileError(
        f"Cannot write {str(path)!r}: {why}.", "Choose a path in a folder that exists and can be written to."
    )
