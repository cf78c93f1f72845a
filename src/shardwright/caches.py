"""What is kept between runs (measured machines, probed operators, compiled kernels): where, and whom it is believed of.

``$SHARDWRIGHT_CACHE`` moves all of it; otherwise it lies under ``$XDG_CACHE_HOME/shardwright`` or ``~/.cache/shardwright``.
A cache only saves time: where it cannot be written everything works without it and says so once. Only folders and files
that belong to the user who runs this, and that nobody else can write to, are believed; others are left alone and named.
"""

from __future__ import annotations

import logging
import os
import stat
from functools import cache
from pathlib import Path

from shardwright.errors import FileError
from shardwright.files import write as write_file

VARIABLE = "SHARDWRIGHT_CACHE"
LARGEST = 1 << 24
_log = logging.getLogger("shardwright")


@cache
def say_once(text: str) -> None:
    """Tell the user something about the caches, the first time only."""
    _log.warning("shardwright: %s", text)


def root() -> Path | None:
    """The folder of all caches; nothing where not even a home is known.

    >>> import os; os.environ["SHARDWRIGHT_CACHE"] = "/somewhere"
    >>> str(root())
    '/somewhere'
    """
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "shardwright"
    except RuntimeError:  # no home
        return None


def cache_folder(kind: str) -> Path | None:
    """The folder for one kind of thing, made if need be; nothing where it cannot be made or is not to be believed."""
    base = root()
    if base is None:
        say_once(f"there is no home folder, so nothing is kept between runs; set {VARIABLE} to a folder.")
        return None
    place = base / kind
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (_tightened(base) and _tightened(place)):
            return None
        if not os.access(place, os.W_OK):
            say_once(f"{place} cannot be written to, so nothing is kept there; {VARIABLE} moves the caches.")
    except OSError as error:
        say_once(f"nothing is kept in {place} between runs ({error.strerror}); {VARIABLE} moves the caches.")
        return None
    return place


def read_cached(kind: str, name: str) -> bytes | None:
    """The content of one entry; nothing where there is none, or none to be believed."""
    place = cache_folder(kind)
    if place is None:
        return None
    try:
        number = os.open(place / name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    with os.fdopen(number, "rb") as file:
        if not is_ours(os.fstat(file.fileno())):
            say_once(f"{place / name} belongs to another user or can be changed by one, and is not used.")
            return None
        return file.read(LARGEST)


def keep(kind: str, name: str, content: str) -> Path | None:
    """Keep an entry; nothing happens where that is not possible."""
    place = cache_folder(kind)
    if place is None:
        return None
    try:
        write_file(place / name, content)
        os.chmod(place / name, 0o600)
    except (FileError, OSError) as error:
        say_once(f"nothing was kept: {getattr(error, 'message', error)}")
        return None
    return place / name


def replace_damaged(kind: str, name: str, why: str) -> None:
    """Name an entry that cannot be understood, and take it away so that it is made anew."""
    place = cache_folder(kind)
    if place is not None:
        say_once(f"{place / name} is damaged ({why}) and will be made anew.")
        (place / name).unlink(missing_ok=True)


def is_ours(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and to nobody else."""
    return not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


def _tightened(place: Path) -> bool:
    """Whether a folder is ours; one of ours that others could write to is closed to them."""
    status = place.stat()
    if is_ours(status):
        return True
    if hasattr(os, "geteuid") and status.st_uid == os.geteuid():
        os.chmod(place, stat.S_IMODE(status.st_mode) & ~0o022)
        return True
    say_once(f"{place} belongs to another user, and what it holds is not used; {VARIABLE} moves the caches.")
    return False
