"""What this machine has, what is wrong with it for our purposes, and what to do about that.

Each check looks at one thing and says what it found; one that fails carries the remedy. The last one starts two processes
and has them add two numbers with gloo, which is what `verify` and `run` need before anything else.

What Shardwright keeps here between runs (:mod:`shardwright.caches`) is counted too, with how to be rid of it: probed rules
of unknown operators, calibrations of ``local:N``, compiled kernels. All are found again when they are needed, at the cost of
time.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright.caches import root
from shardwright.errors import FileError, ShardwrightError
from shardwright.units import bytes_text
from shardwright.version import __version__

OLDEST_TORCH, NEXT_TORCH = (2, 11), (2, 14)
TOGETHER_SECONDS = 120.0


@dataclass(frozen=True)
class Check:
    """One thing looked at. ``fine`` is ``None`` where there is nothing to judge."""

    name: str
    fine: bool | None
    found: str
    remedy: str = ""


def examine(processes: bool = True) -> Iterator[Check]:
    """All checks, one after the other; without ``processes`` nothing is started.

    >>> [check.name for check in examine(processes=False) if check.fine is False]
    []
    """
    looks: list[Callable[[], Check]] = [
        _python,
        _torch,
        _solvers,
        _processors,
        _accelerators,
        _calibration,
        _kept,
        _extras,
    ]
    for look in [*looks, *([_together] if processes else [])]:
        yield look()


def _python() -> Check:
    version = platform.python_version()
    return Check(
        "Python", sys.version_info >= (3, 10), f"{version}, shardwright {__version__}", "Use Python 3.10 or later."
    )


def _torch() -> Check:
    import torch

    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    known = OLDEST_TORCH <= numbers < NEXT_TORCH
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST_TORCH, (NEXT_TORCH[0], NEXT_TORCH[1] - 1)))
    return Check("PyTorch", known, torch.__version__, f"Install torch {oldest} to {newest}, which are the ones tested.")


def _solvers() -> Check:
    missing = []
    for name in ("highspy", "ortools", "numba"):
        try:
            importlib.import_module(name)
        except Exception as problem:  # a solver whose library does not load raises what it likes
            missing.append(f"{name} ({type(problem).__name__}: {str(problem)[:80]})")
    found = f"cannot be loaded: {', '.join(missing)}" if missing else "highspy, ortools and numba load"
    return Check(
        "solvers", not missing, found, "Install them again: pip install -c constraints.txt highspy ortools numba."
    )


def _processors() -> Check:
    from shardwright.cluster.local import cores, quick_figures

    whole, _ = quick_figures(1)
    return Check("processor", True, f"{cores()} cores, {bytes_text(whole.memory)} of memory")


def _accelerators() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("accelerators", None, "no CUDA device: plans can be made for any cluster and run on local:N")
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_properties(i) for i in range(count)]
    listed = ", ".join(f"{p.name} with {bytes_text(p.total_memory)}" for p in names)
    apart = [
        (i, j) for i in range(count) for j in range(count) if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
    if not torch.distributed.is_nccl_available():
        return Check("accelerators", False, f"{listed}; without NCCL", "Install a build of torch with NCCL.")
    links = "" if count == 1 else f"; {len(apart)} pairs without a direct link" if apart else "; all linked directly"
    return Check("accelerators", True, listed + links)


def _calibration() -> Check:
    import torch

    from shardwright.cluster import preset, preset_names

    kept = [file.stem for cache in caches() if cache.name == "calibrations" for file in cache.files]
    measured = ", ".join(kept) or "none of this machine's CPU"
    if not torch.cuda.is_available():
        return Check("calibration", None, measured, "")
    device = torch.cuda.get_device_properties(0).name
    known = [name for name in preset_names() if name.split("-")[0] in device and preset(name)[0].device.profile]
    if known:
        return Check("calibration", True, f"{known[0]} has a measured profile; {measured}")
    return Check("calibration", None, f"no profile of {device}; {measured}", "shardwright calibrate -o device.toml")


def _kept() -> Check:
    if not caches():
        return Check("caches", False, "there is no home folder", "Set SHARDWRIGHT_CACHE to a folder.")
    said = []
    for cache in caches():
        said.append(f"{len(cache.files)} {cache.name} in {cache.folder} ({bytes_text(cache.bytes)})")
        folder = cache.folder
        while not folder.exists():
            folder = folder.parent
        if not os.access(folder, os.W_OK):
            return Check("caches", False, f"{folder} cannot be written to", "Set SHARDWRIGHT_CACHE to a folder.")
    return Check("caches", True, "; ".join(said))


def _extras() -> Check:
    from importlib.util import find_spec

    there = {name: find_spec(name) is not None for name in ("transformers", "playwright")}
    found = ", ".join(f"{name}{'' if has else ' missing'}" for name, has in there.items())
    return Check(
        "extras", None, found, "" if there["transformers"] else "pip install 'shardwright[hf]' for hf: models."
    )


def _together() -> Check:
    from shardwright.runtime.launch import run_locally

    started = time.perf_counter()
    try:
        sums = run_locally(_added, 2, seconds=TOGETHER_SECONDS)
    except ShardwrightError as problem:
        remedy = (
            "Look for a firewall on the loopback interface, too little memory, or a limit on processes (ulimit -u)."
        )
        return Check("two processes", False, problem.message, remedy)
    fine = sums == [3.0, 3.0]
    return Check(
        "two processes", fine, f"met and added in {time.perf_counter() - started:.1f} s", "Report this as a bug."
    )


def _added() -> float:
    import torch
    import torch.distributed as dist

    number = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(number)
    return float(number)


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
