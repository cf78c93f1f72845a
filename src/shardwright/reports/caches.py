"""What Shardwright keeps on this machine between runs, where, and how to be rid of it.

Probed rules of unknown operators and calibrations of ``local:N``: both are found again when they are needed, at the cost of
time only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwright.cluster.local import cache_file
from shardwright.errors import FileError
from shardwright.operators.probing import cache_folder


@dataclass(frozen=True)
class Cache:
    """One kind of thing that is kept: its files, and what is lost without them."""

    name: str
    folder: Path
    files: tuple[Path, ...]
    without: str

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files if file.exists())

    def clear(self) -> None:
        for file in self.files:
            try:
                file.unlink(missing_ok=True)
            except OSError as problem:
                raise FileError(f"Cannot remove {str(file)!r}: {problem.strerror}.", "Remove it by hand.") from None


def caches() -> tuple[Cache, ...]:
    """Everything that is kept.

    >>> [cache.name for cache in caches()]
    ['probed rules', 'calibrations']
    """
    probed, measured = cache_folder(), cache_file(1).parent
    return (
        Cache("probed rules", probed, _files(probed, "*.json"), "operators nobody described are probed again"),
        Cache("calibrations", measured, _files(measured, "local-*.toml"), "local:N is measured again, 40 s each"),
    )


def _files(folder: Path, pattern: str) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob(pattern))) if folder.is_dir() else ()
