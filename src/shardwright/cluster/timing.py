"""Timing one kernel on a real device, as close as possible to what it takes inside a training step.

On a CUDA device calls are queued behind a long matrix product, so that the device never waits for the host and events
around the calls measure kernels back to back. There the median of a few repeats is taken.
On a CPU, where other programs take turns with ours, the fastest repeat is taken, and of a process with a single thread
only the time it had the core is counted: on an idle machine that is the same, on a busy one it is what it would be.
The host of an accelerator is such a CPU too, and a clock is all there is: what issuing takes is measured in yardsticks
(:mod:`shardwright.cluster.pace`), timed in turn with it, and given in seconds at the fastest pace of that yardstick.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from shardwright.cluster.pace import Yardstick

Run = Callable[[], Any]

QUEUE = 1000
"""Kernels that CUDA takes before it makes the host wait: 1,024, less those of the delay."""
FASTEST_LAUNCH = 1.5e-6
"""Seconds: no host launches kernels faster than this."""


def queued_calls(seconds: float, host: float) -> int:
    """How many calls to time at once, each so many seconds on the device and on the host: about 1.5 ms of them, and no more
    than the queue holds for certain (a recurrence of 256 steps launches 800 kernels: from the second call on the device
    would wait for the host).

    >>> queued_calls(1e-5, 2e-5), queued_calls(1e-3, 2e-5), queued_calls(1e-5, 4e-3)
    (16, 2, 1)
    """
    calls = int(min(max(1.5e-3 / max(seconds, 5e-6), 2), 16))
    return max(1, min(calls, int(QUEUE * FASTEST_LAUNCH / max(host, 1e-9))))


def clock() -> Callable[[], float]:
    """The clock for work on this process's CPU threads."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


class Stopwatch:
    """Seconds per call on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.yardstick = Yardstick(device)
        if device.type == "cuda":
            size = 6144
            self._left = torch.randn(size, size, device=device, dtype=torch.float16) * 0.02
            self._events(lambda: self._left @ self._left, 5)  # the first products load the library
            self._delay = self._events(lambda: self._left @ self._left, 5)

    def _events(self, run: Run, calls: int, delays: int = 0) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        for _ in range(delays):
            _ = self._left @ self._left
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls

    def _cuda(self, run: Run, repeats: int) -> float:
        run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        once = time.perf_counter() - began
        calls = queued_calls(once - host, host)
        # The host must have queued everything before the delay ends, or the device would wait for it.
        delays = min(1 + int(1.5 * host * calls / self._delay), 40)
        return statistics.median(self._events(run, calls, delays) for _ in range(repeats))

    def _cpu(self, run: Run, repeats: int) -> float:
        now = clock()
        run()
        began = now()
        run()
        once = now() - began
        calls = int(min(max(4e-3 / max(once, 1e-7), 1), 200))
        times = []
        for _ in range(repeats if once < 0.02 else 0):  # long ones are steady, and time is short
            began = now()
            for _ in range(calls):
                run()
            times.append((now() - began) / calls)
        return min([*times, once])

    def seconds(self, run: Run, repeats: int = 3) -> float:
        """Device seconds of one call, the host's time to issue it left out (on a CPU there is no difference)."""
        return self._cuda(run, repeats) if self.device.type == "cuda" else self._cpu(run, repeats)

    def host_seconds(self, run: Run, calls: int = 40, repeats: int = 15) -> float:
        """Seconds per call when calls are issued without waiting; small tensors make this the host's time."""
        now = clock() if self.device.type == "cpu" else time.perf_counter

        def issue() -> float:
            self.wait()
            began = now()
            for _ in range(calls):
                run()
            return (now() - began) / calls

        if self.device.type == "cpu":
            return min(issue() for _ in range(repeats))
        ratios = [taken / stick for taken, stick in self.yardstick.beside(issue, repeats)]
        self.wait()
        return statistics.median(ratios) * sum(self.yardstick.fastest)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
