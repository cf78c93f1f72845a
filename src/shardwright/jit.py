"""Compiled loops: numba's ``njit`` with a cache that may be missing, read-only, torn or somebody else's.

numba's own cache ends the program where it cannot be written, or where one of its files is damaged, writes its index
before what the index names, and unpickles whatever lies in its folder. Here the cache lies with the others
(:mod:`shardwright.caches`), is believed only of this user, is written so that a killed process leaves no index of absent
code, notices when any module beside the kernel's own has changed, and is left out where it does not work. Of several
processes that want the same kernels, as the ranks of a job that plan anew do, one compiles and the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

from shardwright.caches import cache_folder, is_ours, say_once

KIND = "compiled"
PATIENCE = 120.0
"""All kernels of a search compile in less, on a slow machine too."""


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``@kernel(nogil=True)`` compiles a function when it is first called and keeps what was compiled."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        place = _folder()
        if place is not None:
            dispatcher._cache = _Cache(function, place)
        return dispatcher

    return decorate


@cache
def _folder() -> Path | None:
    """Where compiled kernels are kept: pickles, so that a single file of somebody else spoils the whole folder."""
    place = cache_folder(KIND)
    if place is None or not os.access(place, os.W_OK):
        return None
    for parent, folders, names in os.walk(place):
        for name in (*folders, *names):
            if not is_ours(os.lstat(os.path.join(parent, name))):
                say_once(f"{os.path.join(parent, name)} belongs to another user; no compiled kernels are kept.")
                return None
    return place


@cache
def _stamp(source: Path) -> str:
    """Changes when any module of the kernel's package does: kernels call each other across files."""
    states = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(source.parent.glob("*.py"))]
    return hashlib.sha256(repr((source.name, states, numba.__version__)).encode()).hexdigest()[:16]


class _Files(IndexDataCacheFile):
    """Index and code of one kernel; the code is there before the index names it, and its name tells its version."""

    def __init__(self, folder: str, base: str, stamp: str) -> None:
        super().__init__(folder, f"{base}.{stamp}", stamp)
        self._older = (f"{base}.", f"{base}.{stamp}.")

    def save(self, key: Any, data: Any) -> None:
        overloads = self._load_index()
        name = self._data_name(len(overloads) + 1)
        while os.path.exists(self._data_path(name)):
            name = self._data_name(int(name.rsplit(".", 2)[1]) + 1)
        self._save_data(name, data)
        self._save_index({**overloads, key: name})
        base, current = self._older
        for entry in os.scandir(self._cache_path):
            if entry.name.startswith(base) and not entry.name.startswith(current):
                os.unlink(entry.path)


class _Turn:
    """One process compiles at a time in each folder; kernels that a kernel calls are compiled in the same turn.

    Nobody waits for ever: whoever has waited :data:`PATIENCE` seconds compiles by itself from then on.
    """

    def __init__(self) -> None:
        self.depth, self.patience, self.file = 0, PATIENCE, -1

    def begin(self, folder: Path) -> None:
        self.depth += 1
        if self.depth == 1 and self.patience:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            end = time.monotonic() + self.patience
            while not self._taken():
                if time.monotonic() > end:
                    self.patience = 0.0
                    return
                time.sleep(0.05)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def end(self) -> None:
        self.depth -= 1
        if self.depth == 0 and self.file >= 0:
            os.close(self.file)  # and the lock is gone
            self.file = -1


_TURN = _Turn()


class _Cache(FunctionCache):
    """numba's cache in our folder, whose troubles cost time and nothing else."""

    def __init__(self, function: Callable[..., Any], place: Path) -> None:
        settings: Any = numba.config
        before, settings.CACHE_DIR = settings.CACHE_DIR, str(place)  # only while numba looks for a place
        try:
            super().__init__(function)
        finally:
            settings.CACHE_DIR = before
        stamp = _stamp(Path(function.__code__.co_filename))
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = self._loaded(sig, target_context)
        if found is None:
            try:
                _TURN.begin(Path(self._cache_path))
            except OSError:  # a folder or a file system without locks
                return None
            found = self._loaded(sig, target_context)  # by whoever had the turn before
            if found is not None:
                _TURN.end()
        return found

    def _loaded(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # a torn pickle may fail in any way
            self._forget(error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            if not isinstance(error, OSError):
                self._forget(error)
            else:
                say_once(f"compiled kernels cannot be kept in {self._cache_path}: {error.strerror}.")
        finally:
            _TURN.end()

    def _forget(self, error: Exception) -> None:
        index = Path(self._cache_file._index_path)
        say_once(f"{index} is damaged ({type(error).__name__}) and will be made anew.")
        index.unlink(missing_ok=True)


@kernel(inline="always")
def copy(source: Any, target: Any) -> None:
    """``target[:] = source`` of as many numbers: with that, numba compiles two seconds at a message about shapes."""
    for i in range(len(source)):
        target[i] = source[i]
