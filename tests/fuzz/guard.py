"""One case of the fuzzer, watched: what it raised, how long it took, what it asked of memory, which files it wrote.

Files and processes are watched by an audit hook of the interpreter (PEP 578), memory by a limit on the address space,
time by the process's own processor seconds (the machine may be busy) and, for waiting without end, the clock.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.caches import root
from shardwright.errors import ShardwrightError

PROCESSOR_SECONDS = 20.0
CLOCK_SECONDS = 400.0
BYTES = 2 << 30
FORBIDDEN_EVENTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "shutil.rmtree",
    "os.remove",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class TookTooLong(BaseException):
    """The case used more than its time; not an ``Exception``, so that no handler swallows it."""


@dataclass
class _Watch:
    inside: Path | None = None
    seen: list[str] = field(default_factory=list)


_watch = _Watch()
_HARMLESS = ("/dev/", "/proc/self", tempfile.gettempdir() + "/torchinductor")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    folder = _watch.inside
    if folder is None:
        return
    if event == "open" and isinstance(args[0], (str, bytes)) and isinstance(args[2], int) and args[2] & WRITES:
        path = os.path.abspath(os.fsdecode(args[0]))
        if not path.startswith((str(folder), str(root()), *_HARMLESS)) and "__pycache__" not in path:
            _watch.seen.append(f"wrote {path}")
    elif event in FORBIDDEN_EVENTS and not str(args[:1]).count(str(folder)):
        _watch.seen.append(f"{event} {args[:1]}")


@functools.cache
def _listen() -> None:
    """From the first case on: nobody can take a hook away, and every import and every file of other tests would call it."""
    sys.addaudithook(_audit)


def _late(number: int, frame: Any) -> None:
    raise TookTooLong


def watched(case: Callable[[], None], folder: Path) -> str | None:
    """Run a case; what was wrong with how it behaved, in a line, or nothing."""
    _listen()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = signal.signal(signal.SIGPROF, _late), signal.signal(signal.SIGALRM, _late)
    began = time.process_time()
    problem: str | None = None
    _watch.inside, _watch.seen = folder, []
    try:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, CLOCK_SECONDS)
        case()
    except ShardwrightError as error:
        if "\n" in error.message.strip() or not error.message:
            problem = f"not one sentence: {error.message[:200]!r}"
    except SystemExit as stop:
        problem = None if stop.code in (0, 1, 2, None) else f"exit status {stop.code}"
    except TookTooLong:
        problem = f"hang: {time.process_time() - began:.1f} s of processor time; {_where()}"
    except MemoryError:
        problem = f"more than {BYTES} bytes; {_where()}"
    except BaseException as error:
        problem = f"traceback: {type(error).__name__}: {str(error)[:120]!r}; {_where()}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _watch.inside = None
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])
    if problem is None and _watch.seen:
        problem = f"touched what it should not: {_watch.seen[0]}"
    return problem


def _where() -> str:
    """The innermost line of ours, which names the fault."""
    frames = traceback.extract_tb(sys.exc_info()[2])
    ours = [frame for frame in frames if "shardwright" in frame.filename]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "outside"
