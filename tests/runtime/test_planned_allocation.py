"""Scripts that leave the allocator no choice, on requests that a GPU's allocator really got and on random ones.

The real ones (``bench/measured/device_step/requests``) are those of steps recorded as CUDA graphs on an H200, with what the
allocator reserved for them.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.costs.memory_allocator import SMALL_SEGMENT, KiB, MiB
from shardwright.runtime.planned_allocation import AllocatorEvent, Window, performed, planned_allocation

REAL = sorted((Path(__file__).parents[2] / "bench" / "measured" / "device_step" / "requests").glob("*.json.gz"))


def real(file: Path) -> tuple[int, list[Window]]:
    """0 ends a window, a positive number is a request, a negative one the end of the request of that number (from -1)."""
    stored = json.loads(gzip.decompress(file.read_bytes()))
    windows: list[list[AllocatorEvent]] = [[]]
    count = 0
    for entry in stored["events"]:
        if entry == 0:
            windows.append([])
        elif entry > 0:
            windows[-1].append(AllocatorEvent(count, entry))
            count += 1
        else:
            windows[-1].append(AllocatorEvent(~entry, 0))
    return stored["reserved"], list(windows)


@pytest.mark.parametrize("file", REAL, ids=lambda file: file.name.split(".")[0])
def test_recorded_steps_take_what_is_alive_at_once(file: Path) -> None:
    reserved, windows = real(file)
    found = planned_allocation(windows)
    assert performed(windows) == found.left == pytest.approx(reserved, rel=0.0015)  # the model is the allocator
    assert performed(windows, found.arena, found.scripts) == found.reserved
    small = found.reserved - found.arena
    assert found.bound <= found.arena <= 1.001 * found.bound + 2 * MiB
    assert 0 <= small <= 32 * MiB
    assert found.reserved < found.left


def test_there_are_real_steps() -> None:
    assert len(REAL) == 11


sizes = st.one_of(st.integers(1, 600 * KiB), st.integers(MiB, 40 * MiB), st.sampled_from([12 * MiB, 48 * MiB, 7 * MiB]))


@given(st.lists(st.lists(st.tuples(sizes, st.integers(0, 12)), min_size=1, max_size=4), min_size=1, max_size=25))
@settings(max_examples=120, deadline=None)
def test_a_script_never_takes_more_than_no_script(drawn: list[list[tuple[int, int]]]) -> None:
    """A request lives for as many requests as its number says, or for good."""
    windows: list[list[AllocatorEvent]] = []
    ends: dict[int, list[int]] = {}
    count = 0
    for requests in drawn:
        windows.append([])
        for size, length in requests:
            windows[-1] += [AllocatorEvent(number, 0) for number in ends.pop(count, [])]
            windows[-1].append(AllocatorEvent(count, size))
            if length < 12:
                ends.setdefault(count + 1 + length, []).append(count)
            count += 1
    found = planned_allocation(windows)
    assert found.bound <= found.reserved <= found.left == performed(windows)
    assert performed(windows, found.arena, found.scripts) == found.reserved
    assert all(step < 0 or step > MiB for script in found.scripts.values() for step in script)


def test_gathered_parameters_leave_no_holes_between_activations() -> None:
    """Every layer gathers its parameters, keeps activations and lets the parameters go; the last needs much at once."""
    windows: list[list[AllocatorEvent]] = []
    count = 0
    for _ in range(12):
        windows.append([AllocatorEvent(count, 14 * MiB)])
        windows.append([AllocatorEvent(count + 1, 12 * MiB)])
        windows.append([AllocatorEvent(count + 2, 3 * MiB), AllocatorEvent(count, 0)])
        count += 3
    windows.append([AllocatorEvent(count, 300 * MiB)])
    bound = 12 * 15 * MiB + 300 * MiB
    found = planned_allocation(windows)
    assert (found.bound, found.arena, found.reserved) == (bound, bound, bound)
    assert found.left > 1.02 * bound


def test_small_requests_are_left_to_their_own_segments() -> None:
    found = planned_allocation([[AllocatorEvent(0, 600 * KiB), AllocatorEvent(1, 600 * KiB)]])
    assert (found.arena, found.scripts) == (0, {})
    assert found.reserved == SMALL_SEGMENT
