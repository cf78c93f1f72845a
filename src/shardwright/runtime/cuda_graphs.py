"""CUDA graphs in one pool of memory, in which everything lies where it was planned.

A first recording is a rehearsal: which requests the allocator gets, and when they end, is read from its own history, so
that what kernels take for themselves is known to the byte. The requests are packed
(:mod:`~shardwright.runtime.planned_allocation`), the rehearsal is thrown away, and a second recording is made in one
segment of the planned size, in which a script keeps open only the places where results should lie. Nothing else differs:
the same kernels in the same order, at other addresses.

What is not as it was rehearsed is still right, only larger: then, and where something cannot be planned, recordings are made
as the allocator serves them, and the log says why, once.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shardwright._torch_compat import (
    Allocation,
    Segment,
    allocations_are_recorded,
    end_failed_capture,
    pool_segments,
    record_allocations,
    recorded_allocations,
)
from shardwright.garbage import collection_paused
from shardwright.lowering.randomness import drawing_from, standing_generators
from shardwright.runtime.planned_allocation import AllocatorEvent, PlannedAllocation, performed, planned_allocation

SWITCH = "SHARDWRIGHT_CUDA_GRAPHS"
"""Set to 0 in the environment: nothing is captured."""
PLANNING = "SHARDWRIGHT_PLANNED_MEMORY"
"""Set to 0 in the environment: the allocator decides where captured results lie."""

_WITHIN = 1.02
"""Where a recording reserves more than this times what the model of the allocator says, the model is not believed."""

_REHEARSALS = 2
"""A performance that is not as rehearsed is rehearsed again, once."""
_MOMENT = 5e-5
"""Seconds between windows in which other threads may let go of what they have handed over (gradients of autograd):
they wait for Python, and how long something lives must not depend on when they get it."""
_HIGHEST = 1 << 63
_MODE = "thread_local"

log = logging.getLogger("shardwright")


class Recording(Protocol):
    def replay(self) -> None: ...


class Recorder(Protocol):
    """Records work on tensors, one part after the other, so that it can be done again where they lie."""

    def attempt(self) -> AbstractContextManager[Any]:
        """Around all recordings that are made and done again together."""

    def record(self, work: Callable[[], None], draws: bool = False) -> Recording:
        """``draws``: the work draws random numbers."""

    def apart(self, work: Callable[[], None]) -> None:
        """Called while recording: the work is not recorded but done between two parts of the recording, whenever that is
        replayed."""

    def memory(self) -> AbstractContextManager[Any]:
        """Passes before the first recording take their memory here: it is given back when the recording begins."""

    def window(self) -> None:
        """Called while recording, before every part of the work."""

    def again(self) -> bool:
        """After an attempt: whether its recordings should be thrown away and made once more."""

    def failed(self, error: Exception) -> bool:
        """After an attempt failed: whether to make another."""


class InParts:
    """Graphs, and work of the host between them."""

    def __init__(self, parts: Sequence[Callable[[], None]]) -> None:
        self._parts = parts

    def replay(self) -> None:
        for part in self._parts:
            part()


class CudaGraphs:
    """PyTorch's CUDA graphs in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._beside = _Beside.of(device)
        self._stream = self._beside.stream
        self._before: Any = torch.cuda.MemPool()
        self._ready: set[int] = set()
        self._act: _Rehearsal | _Performance | None = None
        self._rehearsals = _REHEARSALS
        self._unplanned = ""
        """Why the memory of the next recording is not planned, to be said if it succeeds."""
        self._generators: Mapping[int, torch.Generator] = {}
        """Those that this attempt draws from."""
        self._draws = False
        self._capturing: Any = None
        self._last: torch.cuda.CUDAGraph | None = None
        self._parts: list[Callable[[], None]] = []
        if os.environ.get(PLANNING) != "0":
            if allocations_are_recorded():
                self._not_planned("somebody else records the history of allocations")
            else:
                self._act = _Rehearsal(device)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        self._generators = {}
        if self._before is not None:
            self._before = None
            torch.cuda.empty_cache()
            self._beside.prepare()
        if self._act is not None:
            self._act.begin()
        gc.collect()
        with collection_paused():  # how long something lives must not depend on when garbage is collected
            yield

    def record(self, work: Callable[[], None], draws: bool = False) -> Recording:
        drawing: AbstractContextManager[None] = nullcontext()
        if draws:
            self._generators = self._generators or standing_generators(self._device)
            drawing = drawing_from(self._generators)
        self._draws = draws
        graph = self._graph()
        self._parts = parts = [graph.replay]
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=_MODE)
        self._capturing = capturing
        before, first = torch.cuda.current_stream(self._device), list[Exception]()
        try:
            with drawing, warnings.catch_warnings(), capturing:
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # so is a reduction with nobody else
                try:
                    self.window()
                    work()
                except Exception as error:
                    first.append(error)
                    raise
        except BaseException as error:
            # PyTorch's own leaves its stream the current one, and the allocator in the pool, where a capture does not end.
            torch.cuda.set_stream(before)
            end_failed_capture(self._last, self._device, self._pool)
            if not first or not isinstance(error, Exception):
                raise
            reason = first.pop()  # not what CUDA says at the end of a capture that broke off
            try:
                raise reason from None
            finally:
                del reason  # else it holds the tensors of its frames, this one among them
        finally:
            self._capturing, self._last, self._parts = None, None, []  # what is thrown away gives back its memory
        return graph if len(parts) == 1 else InParts(parts)

    def apart(self, work: Callable[[], None]) -> None:
        capturing = self._capturing
        capturing.cuda_graph.capture_end()
        capturing.cuda_graph = graph = self._graph()
        graph.capture_begin(pool=self._pool, capture_error_mode=_MODE)
        self._parts += [work, graph.replay]

    def _graph(self) -> torch.cuda.CUDAGraph:
        self._last = graph = torch.cuda.CUDAGraph()
        for generator in self._generators.values() if self._draws else ():
            graph.register_generator_state(generator)
        return graph

    def memory(self) -> AbstractContextManager[Any]:
        # Else optimizer states would be cut from segments of activations, which nobody could give back. A recording cannot
        # use them again either: it is made on a stream of its own.
        if self._before is None:
            return nullcontext()
        if get_ident() not in self._ready:  # this thread's handle of cuBLAS owns a workspace for good: not in there
            self._ready.add(get_ident())
            _multiply(self._device)
        return torch.cuda.use_mem_pool(self._before, self._device)

    def window(self) -> None:
        if self._act is not None:
            time.sleep(_MOMENT)
            self._act.window()

    def again(self) -> bool:
        if self._act is None:
            if self._unplanned:
                self._not_planned(self._unplanned)
            return False
        segments = pool_segments(self._device, self._pool)
        reserved = sum(segment.size for segment in segments)
        if isinstance(self._act, _Performance):
            planned = self._act.steering.reserved
            if reserved > _WITHIN * planned:
                raise _NotAsRehearsed(f"it took {reserved} bytes where {planned} were planned")
            self._act = None
            return False
        windows = self._act.windows([s for s in segments if s.stream == self._stream.cuda_stream])
        expected = performed(windows)
        if not reserved / _WITHIN <= expected <= reserved * _WITHIN:
            self._not_planned(f"the allocator took {reserved} bytes where its model takes {expected}")
            return False
        steering = planned_allocation(windows)
        if steering.reserved >= reserved:
            self._act = None
            return False
        shown = (x / 2**30 for x in (steering.reserved, steering.bound, reserved))
        log.info("The recorded step lies in %.3f GiB; alive at once are %.3f, unplanned it takes %.3f.", *shown)
        self._act, self._pool = _Performance(self._device, steering), torch.cuda.graph_pool_handle()
        return True

    def failed(self, error: Exception) -> bool:
        if self._act is None:
            return False
        self._act.end()
        self._pool = torch.cuda.graph_pool_handle()
        self._rehearsals -= 1
        if self._rehearsals and isinstance(error, _NotAsRehearsed):
            self._act = _Rehearsal(self._device)
        else:
            self._act, self._unplanned = None, " ".join(str(error).split())[:300]
        return True

    def _not_planned(self, why: str) -> None:
        self._act, self._unplanned = None, ""
        log.warning("The memory of the recorded step is left to the allocator: %s.", why)


class _Beside:
    """The stream on which all recordings of a device are made, and the memory of its libraries' workspaces, which they keep
    for good: not in a pool that comes and goes, and once for all models."""

    known: ClassVar[WeakValueDictionary[torch.device, _Beside]] = WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        self._device, self.stream = device, torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.MemPool()
        self._ready: set[int] = set()

    @classmethod
    def of(cls, device: torch.device) -> _Beside:
        found = cls.known.get(device)
        if found is None:
            found = cls.known[device] = cls(device)
        return found

    def prepare(self) -> None:
        if get_ident() not in self._ready:  # libraries know threads apart
            self._ready.add(get_ident())
            with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self._pool, self._device):
                _multiply(self._device)


class _NotAsRehearsed(RuntimeError):  # noqa: N818 - it says what happened
    """Requests came in another order, or lived longer."""


class _Rehearsal:
    """Notes where windows begin, and what is requested in each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Tensor] = []

    def begin(self) -> None:
        if not self._marks:
            record_allocations(self._device)

    def window(self) -> None:
        self._marks.append(_bytes(1, self._device))

    def end(self) -> list[Allocation]:
        return recorded_allocations(self._device)

    def windows(self, segments: Sequence[Segment]) -> list[list[AllocatorEvent]]:
        """The requests of every window that were served from these segments."""
        events = self.end()
        latest = {event.address: place for place, event in enumerate(events) if event.taken}
        begins = {
            latest.get(mark.data_ptr(), -1) for mark in self._marks
        }  # a mark stays, so its request is the last there
        ranges = sorted((s.address, s.address + s.size) for s in segments)
        windows: list[list[AllocatorEvent]] = []
        alive: dict[int, int] = {}
        for place, event in enumerate(events):
            near = bisect_right(ranges, (event.address, _HIGHEST)) - 1
            if place in begins:
                windows.append([])
            elif windows and near >= 0 and event.address < ranges[near][1]:
                if event.taken:
                    alive[event.address] = place
                    windows[-1].append(AllocatorEvent(place, event.size))
                elif event.address in alive:
                    windows[-1].append(AllocatorEvent(alive.pop(event.address), 0))
        if len(windows) != len(self._marks):
            raise RuntimeError(f"of {len(self._marks)} parts of the step the allocator's history shows {len(windows)}")
        return windows


class _Performance:
    """Keeps open the planned places."""

    def __init__(self, device: torch.device, steering: PlannedAllocation) -> None:
        self._device, self.steering = device, steering
        self._held: list[Tensor | None] = []
        self._number = -1
        self._before = 0

    def begin(self) -> None:
        """Before a capture begins there is nothing to do."""

    def end(self) -> None:
        self._held.clear()

    def window(self) -> None:
        self._number += 1
        reserved = torch.cuda.memory_reserved(self._device)
        if self._number == 0:
            self._before = reserved
            _bytes(self.steering.arena, self._device)  # taken and given back: from now on there is one segment
        elif reserved - self._before > _WITHIN * self.steering.reserved:
            taken = reserved - self._before
            raise _NotAsRehearsed(f"it took {taken} bytes where {self.steering.reserved} were planned")
        script = self.steering.scripts.get(self._number)
        if script is None:
            return
        self._held.clear()
        for step in script:
            if step > 0:
                self._held.append(_bytes(step, self._device))
            else:
                self._held[~step] = None


def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def _multiply(device: torch.device) -> None:
    """Let the libraries of matrix products take the workspaces that they keep for this thread and stream."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(16, 16, device=device, dtype=dtype)
        torch.addmm(x[0], x @ x, x)
