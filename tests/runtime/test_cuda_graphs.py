"""Recordings whose memory is planned, on a pretended device: the model of its allocator, and a history of requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch

from shardwright._torch_compat import Allocation, Segment
from shardwright.costs.memory_allocator import AddressSpace, Allocator, MemoryBlock, MiB
from shardwright.runtime import cuda_graphs
from shardwright.runtime.cuda_graphs import PLANNING, CudaGraphs

BOUND = 12 * 15 * MiB + 300 * MiB


class Pool(Allocator):
    """The allocator's part of one pool, whose segments can be looked at."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.segments: list[Segment] = []
        self._end = number << 50

    def _segment(self, space: AddressSpace, size: int) -> None:
        self.segments.append(Segment(self._end, size, 7))
        super()._segment(space, size)


class Device:
    """One device with private pools, of which the last is allocated from."""

    def __init__(self) -> None:
        self.pools: list[Pool] = [Pool(0)]
        self.history: list[Allocation] | None = None
        self.histories = 0
        self.stream, self.ended = "the user's", list[Any]()
        self.calls: list[tuple[Graph | None, str]] = []
        """What graphs were asked."""
        self.hidden = 0
        """Bytes that the allocator reserves beside what its model says."""

    def handle(self) -> tuple[int, int]:
        self.pools.append(Pool(len(self.pools)))
        return 0, len(self.pools) - 1

    def take(self, size: int, _: Any = None) -> Piece:
        return Piece(self, size)

    def note(self, taken: bool, block: MemoryBlock) -> None:
        if self.history is not None:
            self.history.append(Allocation(taken, block.start, block.size))

    def record(self, _: Any) -> None:
        self.history, self.histories = [], self.histories + 1

    def recorded(self, _: Any) -> list[Allocation]:
        found, self.history = self.history or [], None
        return found

    def segments(self, _: Any, pool: tuple[int, int]) -> list[Segment]:
        return [*self.pools[pool[1]].segments, Segment(1, self.hidden, 0)]

    def reserved(self, _: Any) -> int:
        return sum(pool.reserved for pool in self.pools)


class Piece:
    """A tensor as far as memory goes."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.pool = device, device.pools[-1]
        block = self.pool.take(size)
        assert block is not None
        self.block = block
        device.note(True, block)

    def __del__(self) -> None:
        self.pool.give(self.block)
        self.device.note(False, self.block)

    def data_ptr(self) -> int:
        return self.block.start


class Graph:
    """Notes what is asked of it."""

    def __init__(self, calls: list[tuple[Graph | None, str]]) -> None:
        self.calls = calls

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.calls.append((self, f"begins in {pool}, {capture_error_mode}"))

    def capture_end(self) -> None:
        self.calls.append((self, "ends"))

    def replay(self) -> None:
        self.calls.append((self, "replays"))


class Capturing:
    """``torch.cuda.graph``: it ends the graph that it has then."""

    def __init__(self, graph: Graph, pool: Any, **others: Any) -> None:
        self.cuda_graph, self.pool = graph, pool

    def __enter__(self) -> None:
        self.cuda_graph.capture_begin(self.pool, "thread_local")

    def __exit__(self, *_: object) -> None:
        self.cuda_graph.capture_end()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    here = lambda *_, **__: nullcontext()
    for name, what in {
        "graph_pool_handle": made.handle,
        "Stream": lambda _: type("Stream", (), {"cuda_stream": 7})(),
        "MemPool": object,
        "CUDAGraph": lambda: Graph(made.calls),
        "empty_cache": lambda: None,
        "stream": here,
        "use_mem_pool": here,
        "graph": Capturing,
        "memory_reserved": made.reserved,
        "current_stream": lambda _=None: made.stream,
        "set_stream": lambda stream: setattr(made, "stream", stream),
    }.items():
        monkeypatch.setattr(torch.cuda, name, what)
    monkeypatch.setattr(cuda_graphs, "_bytes", made.take)
    monkeypatch.setattr(cuda_graphs, "_multiply", lambda _: None)
    monkeypatch.setattr(cuda_graphs, "record_allocations", made.record)
    monkeypatch.setattr(cuda_graphs, "recorded_allocations", made.recorded)
    monkeypatch.setattr(cuda_graphs, "pool_segments", made.segments)
    monkeypatch.setattr(cuda_graphs, "end_failed_capture", lambda graph, _, pool: made.ended.append(pool))
    monkeypatch.setattr(cuda_graphs._Beside, "known", WeakValueDictionary())
    yield made


class Step:
    """Every layer gathers parameters and keeps activations; the last needs much at once. ``late``: the gathered parameters
    of so many layers are let go of later than usual."""

    def __init__(self, device: Device, recorder: CudaGraphs) -> None:
        self.device, self.recorder, self.kept, self.late = device, recorder, list[Any](), 0

    def forward(self) -> None:
        waiting: dict[str, Any] = {}
        for layer in range(12):
            self.recorder.window()
            gathered = self.device.take(14 * MiB)
            self.recorder.window()
            self.kept.append(self.device.take(12 * MiB))
            self.recorder.window()
            self.kept += [self.device.take(3 * MiB), self.device.take(1000)]
            waiting["last"] = gathered if layer < self.late else None
            del gathered

    def backward(self) -> None:
        self.recorder.window()
        self.kept.append(self.device.take(300 * MiB))

    def made(self, between: Callable[[int], None] = lambda _: None) -> int:
        """Recorded as often as the recorder wants; how often that was."""
        for times in range(1, 9):
            self.kept.clear()
            between(times)
            try:
                with self.recorder.attempt():
                    self.recorder.record(self.forward)
                    self.recorder.record(self.backward)
                if not self.recorder.again():
                    return times
            except RuntimeError as error:
                if not self.recorder.failed(error):
                    raise
        raise AssertionError("It is recorded for ever.")


def test_a_step_lies_where_it_was_planned(device: Device) -> None:
    step = Step(device, CudaGraphs(torch.device("cpu")))
    assert step.made() == 2
    rehearsed, performed = device.pools[-2:]
    assert [s.size for s in performed.segments] == [BOUND, 2 * MiB]  # one for all, and one for what is small
    assert rehearsed.reserved > 1.02 * performed.reserved
    assert performed.allocated == sum(piece.block.size for piece in step.kept)  # nothing is held any more
    assert device.histories == 1 and device.history is None


def test_what_is_not_as_rehearsed_is_rehearsed_again(device: Device) -> None:
    step = Step(device, CudaGraphs(torch.device("cpu")))

    def between(times: int) -> None:
        step.late = 9 if times == 2 else 0

    assert step.made(between) == 4
    assert device.pools[-1].segments[0].size == BOUND


def test_what_never_is_as_rehearsed_is_left_to_the_allocator(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    step = Step(device, CudaGraphs(torch.device("cpu")))

    def between(times: int) -> None:
        step.late = 9 * (times % 2 == 0)

    with caplog.at_level(logging.WARNING, "shardwright"):
        assert step.made(between) == 5
    assert "left to the allocator: it took" in caplog.text and caplog.text.count("left to") == 1
    assert device.pools[-1].reserved == device.pools[1].reserved  # as the first rehearsal
    assert device.history is None


def test_an_allocator_that_is_not_the_model_is_left_alone(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.hidden = 100 * MiB
    with caplog.at_level(logging.WARNING, "shardwright"):
        assert Step(device, CudaGraphs(torch.device("cpu"))).made() == 1
    assert "where its model takes" in caplog.text


def test_a_failed_performance_is_told_once(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    step = Step(device, CudaGraphs(torch.device("cpu")))

    def between(times: int) -> None:
        if times == 2:
            device.take = _refused  # type: ignore[method-assign]
        elif "take" in vars(device):
            del vars(device)["take"]

    def _refused(size: int, _: Any = None) -> Piece:
        raise torch.cuda.OutOfMemoryError(f"no {size} bytes")

    with caplog.at_level(logging.WARNING, "shardwright"):
        assert step.made(between) == 3
    assert "left to the allocator: no" in caplog.text


class Broken:
    """A capture that cannot be ended: ``torch.cuda.graph`` leaves its stream the current one then."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.device.stream = "the capture's"

    def __exit__(self, *_: Any) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_capture_that_breaks_off_leaves_the_stream_and_says_why(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: Broken(device))
    recorder = CudaGraphs(torch.device("cpu"))

    def work() -> None:
        raise ValueError("Expected X.is_contiguous(memory_format) to be true")

    with pytest.raises(ValueError, match="Expected X"):
        recorder.record(work)
    assert device.stream == "the user's" and device.ended == [recorder._pool]
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.record(lambda: None)
    assert device.stream == "the user's"


def test_a_rehearsal_that_fails_says_so_once(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    recorder = CudaGraphs(torch.device("cpu"))
    with caplog.at_level(logging.WARNING, "shardwright"):
        assert recorder.failed(RuntimeError("it synchronizes")) and not recorder.failed(RuntimeError("it synchronizes"))
    assert not caplog.text  # the caller says that nothing is recorded


def test_the_switch_and_others_that_record(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PLANNING, "0")
    assert Step(device, CudaGraphs(torch.device("cpu"))).made() == 1
    monkeypatch.delenv(PLANNING)
    monkeypatch.setattr(cuda_graphs, "allocations_are_recorded", lambda: True)
    with caplog.at_level(logging.WARNING, "shardwright"):
        assert Step(device, CudaGraphs(torch.device("cpu"))).made() == 1
    assert "somebody else records" in caplog.text
    assert device.histories == 0


def test_work_that_stays_apart_is_done_between_two_graphs(device: Device) -> None:
    """One ends before the next begins, both in one pool, and replays are in the same order, as often as one likes."""
    recorder = CudaGraphs(torch.device("cpu"))

    def work() -> None:
        recorder.apart(lambda: device.calls.append((None, "apart")))

    with recorder.attempt():
        recording = recorder.record(work)
    (first, began), (_, ended), (second, begins), (last, ends) = device.calls
    assert (first is not second, last is second) == (True, True)
    assert (began, ended, ends) == (begins, "ends", "ends")
    device.calls.clear()
    recording.replay()
    recording.replay()
    assert device.calls == 2 * [(first, "replays"), (None, "apart"), (second, "replays")]


def test_all_models_are_recorded_on_one_stream(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries' workspaces are taken once."""
    taken: list[Any] = []
    monkeypatch.setattr(cuda_graphs, "_multiply", taken.append)
    here = torch.device("cpu")
    first, second = CudaGraphs(here), CudaGraphs(here)
    assert first._stream is second._stream
    for recorder in (first, second):
        Step(device, recorder).made()
    assert len(taken) == 1
