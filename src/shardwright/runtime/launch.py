"""Local processes in one gloo group, for verification: started, watched and always ended.

A process that fails ends the others at once and its error is reported with its rank; when nothing has come back in time,
all are ended. No rank outlives the call, nor the process that made it: one whose parent is gone ends itself. They are forked
from one idle process, which imports once what all of them need and ends with ours.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from shardwright._torch_compat import MODULES_OF_A_CAPTURE
from shardwright.errors import RunError, ShardwrightError

GRACE_SECONDS = 2.0


def run_locally(function: Callable[..., Any], processes: int, *args: Any, seconds: float = 1800.0) -> list[Any]:
    """``function(*args)`` on every rank of a new group of local processes; their results in rank order.

    ``function`` and its arguments must be picklable (module-level functions).

    Raises
    ------
    RunError
        When a rank fails, dies or does not answer within ``seconds``.
    """
    context, port = forking_context(), free_port()
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)), **os.environ}
    ranks: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(processes):
            mine, theirs = context.Pipe(duplex=False)
            given = (rank, processes, port, theirs, seconds, environment, function, args)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(mine)
        return _collect(pipes, seconds)
    finally:
        for process in ranks:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()


def forking_context() -> Any:
    """Makes processes by forking one that imports what packages of ours this one had imported when it made the first."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("forkserver")
    imported = [name for name in sys.modules if name.startswith("shardwright.") and name.count(".") == 1]
    if "shardwright.frontend" in imported:  # ranks that verify capture for themselves
        imported += MODULES_OF_A_CAPTURE
    if "transformers" in sys.modules:  # whose models the ranks will need too, and which are slow to import
        imported.append("transformers.modeling_utils")
    context.set_forkserver_preload(imported)
    return context


def _collect(pipes: list[Connection], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(results) < len(pipes):
        waiting: list[Any] = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready: list[Any] = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise RunError(
                f"Ranks {missing} have not finished after {seconds:.0f} s.", "Allow more time, or a smaller model."
            )
        for pipe in ready:
            answer = _received(pipes, pipes.index(pipe))
            if answer.kind != "result":
                raise _first_cause(answer, pipes, results)
            results[answer.rank] = answer.value
    return [results[rank] for rank in range(len(pipes))]


class _Answer(NamedTuple):
    """What a rank sent: its ``result``, or why it was ``refused`` or ``failed``, and when that happened."""

    rank: int
    kind: str
    value: Any
    moment: float


def _received(pipes: list[Connection], rank: int) -> _Answer:
    try:
        return _Answer(rank, *pipes[rank].recv())
    except EOFError:
        remedy = "Try fewer processes or a smaller model."
        return _Answer(rank, "refused", ("it died without a word (out of memory?).", remedy), time.time())


def _first_cause(answer: _Answer, pipes: list[Connection], results: Mapping[int, Any]) -> RunError:
    """Ranks that lose a peer complain too: of all that fail within a moment, the first to fail is to blame."""
    failed, deadline = [answer], time.monotonic() + GRACE_SECONDS
    for rank, pipe in enumerate(pipes):
        if rank not in results and rank != answer.rank and pipe.poll(max(0.0, deadline - time.monotonic())):
            failed.append(_received(pipes, rank))
    rank, kind, value, _ = min((a for a in failed if a.kind != "result"), key=lambda a: a.moment)
    if kind == "refused":
        return RunError(f"Rank {rank}: {value[0]}", value[1])
    return RunError(f"Rank {rank} failed: {value}.", "If the model runs by itself, this is a defect; please report it.")


def _serve(
    rank: int,
    size: int,
    port: int,
    pipe: Connection,
    seconds: float,
    environment: Mapping[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()  # what it was forked from began with the variables of an earlier call
    os.environ.update(environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # what was imported before the fork stays: nobody need look there for garbage
    import torch
    import torch.distributed as dist

    from shardwright.loopback import stay_local

    # Whole tensors are gathered for comparison axis by axis; DTensor would warn that this is slow.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    try:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        # Ranks may wait long for the one that trains alone; a rank that fails ends all, so no shorter limit is needed.
        stay_local()
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
        pipe.send(("result", function(*args), time.time()))
        dist.barrier()
        dist.destroy_process_group()
    except ShardwrightError as error:
        pipe.send(("refused", (error.message, error.remedy), time.time()))
    except Exception as error:  # whatever it is, the parent reports it with the rank's number
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = " ".join(str(error).split())
        pipe.send(("failed", f"{type(error).__name__}: {what} ({place.filename}:{place.lineno})", time.time()))


def _end_with_parent() -> None:
    """A killed parent ends nobody, and ranks left alone would train on for nobody."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
