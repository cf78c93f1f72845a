"""What Shardwright keeps on this machine between runs (:mod:`shardwright.caches`), how much it is, and how to be rid of it.

Probed rules of unknown operators, calibrations of ``local:N``, compiled kernels: all are found again when they are needed,
at the cost of time only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwright.caches import root
from shardwright.errors import FileError

KINDS = (
    ("probed rules", "probed", "*.json", "operators nobody described are probed again"),
    ("calibrations", "", "local-*.toml", "local:N is measured again, 40 s each"),
    ("compiled kernels", "compiled", "**/*", "the first search of a version compiles for some seconds"),
)


@dataclass(frozen=True)
class Cache:
    """One kind of thing that is kept: its files, and what happens without them."""

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
    """Everything that is kept; nothing where there is no home to keep it in.

    >>> [cache.name for cache in caches()]
    ['probed rules', 'calibrations', 'compiled kernels']
    """
    base = root()
    if base is None:
        return ()
    return tuple(
        Cache(name, base / kind, _files(base / kind, pattern), without) for name, kind, pattern, without in KINDS
    )


def _files(folder: Path, pattern: str) -> tuple[Path, ...]:
    found = folder.glob(pattern) if folder.is_dir() else ()
    return tuple(sorted(path for path in found if path.is_file()))
