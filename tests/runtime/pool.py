"""One pool of four gloo processes on loopback for the whole test run.

A test sends a module-level function and its arguments; every worker calls ``function(rank, *args)`` and sends its result
back. A worker that raises sends the traceback as text; one that does not answer in time fails the test and the pool is
rebuilt, so that no test hangs and no test inherits another's broken group.
"""

from __future__ import annotations

import atexit
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as multiprocessing

WORKERS = 4


class WorkerError(AssertionError):
    """What a worker raised, with its traceback."""


def _serve(rank: int, workers: int, port: int, pipe: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(workers))
    import datetime
    import faulthandler

    import torch
    import torch.distributed as dist

    faulthandler.enable()  # a worker that dies says where
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    pipe.send(("ready", None))
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message is None:
            dist.destroy_process_group()
            return
        function, args = message
        try:
            torch.manual_seed(0)
            pipe.send(("result", function(rank, *args)))
        except BaseException as error:  # every failure belongs to the test that sent the function
            pipe.send(("error", f"worker {rank}: {error!r}\n{traceback.format_exc()}"))


class Pool:
    """Four processes in one gloo group."""

    def __init__(self, workers: int = WORKERS) -> None:
        self.workers = workers
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        for rank in range(self.workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.workers, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
        self._collect(60)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
        """The results of ``function(rank, *args)`` on every worker, in rank order."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._collect(seconds)

    def _collect(self, seconds: float) -> list[Any]:
        import time

        deadline = time.monotonic() + seconds
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answered = pipe.poll(max(0.01, deadline - time.monotonic()))
                answers.append(pipe.recv() if answered else ("error", f"worker {rank}: no answer in {seconds} s"))
            except EOFError:
                answers.append(("error", f"worker {rank} died"))
        errors = [text for kind, text in answers if kind == "error"]
        if errors:
            self.close(gently=False)
            raise WorkerError("\n".join(errors))
        return [value for _, value in answers]

    def close(self, gently: bool = True) -> None:
        for pipe in self._pipes:
            if gently:
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join(5 if gently else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


POOL = Pool()
atexit.register(POOL.close, gently=False)
