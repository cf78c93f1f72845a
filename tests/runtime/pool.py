"""One pool of four gloo processes on loopback for the whole test run, and one of two where no test needs more.

A test sends a module-level function and its arguments; every worker calls ``function(rank, *args)`` and sends its result
back. A worker that raises sends the traceback as text. Workers that wait for each other for ever fail the test, and the pool
is rebuilt, so that no test hangs and no test inherits another's broken group; workers that work may take as long as a busy
machine makes them. They are forked as ``run_locally`` forks its ranks, with the variables that the run began with: a pool
outlives the test that needed it first. Where a worker is killed by a signal, or all wait for ever, the test is given one
more try in a new pool, with a warning that says where each of them stood: gloo's own threads now and then corrupt the heap
when several collectives are under way (torch 2.13; docs/running.md), and that says nothing about what is tested here. What
we do wrong fails twice. Between two tests that need it a pool is stopped, as a shell stops a job: gloo's threads wake up a
hundred times a second also where nothing is sent, and those of idle pools took a twelfth of the machine.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

WORKERS = 4
LOOK_SECONDS = 10.0
"""How often workers are asked whether they work: by the processor time that they have had."""
LEAST_WORK = 0.1
"""What threads that only wait use up meanwhile is less."""
MOST_THREADS = 100
"""Of a worker: gloo has three for every group that tests have made, each of which wakes up a hundred times a second."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
_END_WITH_PARENT = 1
"""``PR_SET_PDEATHSIG`` of Linux: a signal that the kernel sends when the process that forked this one ends."""
GRACE_SECONDS = 10.0
"""Once a worker has failed, the others have this long to say so too."""


class WorkerError(AssertionError):
    """What a worker raised, with its traceback."""


class WorkerLostError(WorkerError):
    """A signal ended a worker, or it waits for ever: not an exception of ours."""


def seldom_collect() -> None:
    """What is imported stays, and is not looked through for garbage again and again: that took an eighth of all time."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _serve(rank: int, workers: int, port: int, pipe: Any, environment: dict[str, str], stack: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(workers))
    import datetime
    import faulthandler

    import torch
    import torch.distributed as dist

    from shardwright.loopback import stay_local

    faulthandler.enable()  # a worker that dies says where
    faulthandler.register(signal.SIGUSR1, stack.open("w"))  # and so does one that is late
    seldom_collect()
    with suppress(OSError, AttributeError):  # a system without it
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)  # also while it is stopped
    torch.set_num_threads(1)
    stay_local()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1200))  # the pool gives up sooner
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
    """Processes in one gloo group."""

    def __init__(self, workers: int = WORKERS) -> None:
        self.workers = workers
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._stacks = Path()

    def _start(self) -> None:
        from shardwright.runtime.launch import forking_context, free_port  # only here: most tests need no processes

        self._stacks = Path(tempfile.mkdtemp(prefix="stacks-"))
        context, port = forking_context(), free_port()
        for rank in range(self.workers):
            mine, theirs = context.Pipe()
            given = (rank, self.workers, port, theirs, ENVIRONMENT, self._stacks / str(rank))
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        self._collect(150)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 150) -> list[Any]:
        """The results of ``function(rank, *args)`` on every worker, in rank order.

        ``seconds``: how long they may go without an answer and without any work.
        """
        try:
            return self._run(function, args, seconds)
        except WorkerLostError as error:
            warnings.warn(f"tried again: {error}", stacklevel=2)
            return self._run(function, args, seconds)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
        try:
            if self._threads() > MOST_THREADS:
                self.close()
            if not self._processes:
                self._start()
            self._signal(signal.SIGCONT)
            for pipe in self._pipes:
                pipe.send((function, args))
            results = self._collect(seconds)
            self._signal(signal.SIGSTOP)
            return results
        except BaseException:  # also when the test's own time is over: the next one must not inherit these workers
            self.close(gently=False)
            raise

    def _collect(self, seconds: float) -> list[Any]:
        deadline, worked = time.monotonic() + seconds, self._worked()
        answers: dict[Any, tuple[str, Any]] = {}
        failed = False
        while len(answers) < self.workers and time.monotonic() < deadline:
            waiting = [pipe for pipe in self._pipes if pipe not in answers]
            ready = wait(waiting, timeout=min(LOOK_SECONDS, max(0.01, deadline - time.monotonic())))
            if not ready:
                before, worked = worked, self._worked()
                if worked > before + LEAST_WORK and not failed:
                    deadline = time.monotonic() + seconds
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    answers[pipe] = ("died", None)
                if answers[pipe][0] not in ("result", "ready"):
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        kinds = [answers.get(pipe, ("late", None)) for pipe in self._pipes]
        if all(kind in ("result", "ready") for kind, _ in kinds):
            return [value for _, value in kinds]
        texts, lost = [], False
        for rank, (kind, value) in enumerate(kinds):
            if kind == "died":
                self._processes[rank].join(5)
                code = self._processes[rank].exitcode
                lost |= code is not None and code < 0
                texts.append(f"worker {rank} died (exit code {code})")
            elif kind == "late":
                lost |= not failed
                texts.append(f"worker {rank}: no answer and no work in {seconds} s\n{self._stack(rank)}")
            elif kind == "error":
                texts.append(value)
        raise (WorkerLostError if lost else WorkerError)("\n".join(texts))

    def _threads(self) -> int:
        """Of the first worker."""
        with suppress(IndexError, OSError):  # not started, gone, or a system without /proc
            return len(os.listdir(f"/proc/{self._processes[0].pid}/task"))
        return 0

    def _stack(self, rank: int) -> str:
        """Where a worker stands."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return (self._stacks / str(rank)).read_text()

    def _worked(self) -> float:
        """Processor seconds of all workers so far, in the threads that run Python: gloo's look for messages all the time."""
        ticks = 0
        for process in self._processes:
            try:
                fields = Path(f"/proc/{process.pid}/task/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # gone, or a system without /proc
                continue
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):  # gone: whoever waits for its answer says so
                os.kill(process.pid, number)

    def close(self, gently: bool = True) -> None:
        self._signal(signal.SIGCONT)
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
        if self._stacks.name:
            shutil.rmtree(self._stacks, ignore_errors=True)


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """What a module-level function returns in a process of its own that is gone afterwards."""
    from shardwright.runtime.launch import forking_context

    with ProcessPoolExecutor(1, mp_context=forking_context()) as process:
        return process.submit(function, *args).result()


def once_more_if_killed(attempt: Callable[[], Any]) -> Any:
    """The same second try for whole jobs: an error that names one of these signals is not an exception of ours."""
    try:
        return attempt()
    except Exception as error:
        if not any(signal in str(error) for signal in ("SIGSEGV", "SIGABRT")):
            raise
        warnings.warn(f"tried again: {error}", stacklevel=2)
        return attempt()


POOL, PAIR = Pool(), Pool(2)
for each in (POOL, PAIR):
    atexit.register(each.close, gently=False)
