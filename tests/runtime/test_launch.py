"""Local processes end together, and the one that failed first is named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwright.errors import RunError
from shardwright.runtime.launch import forking_context, run_locally


def second_rank_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no luck")
    dist.barrier()


def ranks() -> int:
    return dist.get_rank()


def test_the_cause_is_named():
    with pytest.raises(RunError) as caught:
        run_locally(second_rank_fails, 2)
    assert "Rank 1 failed: ValueError: no luck" in caught.value.message
    assert "\n" not in caught.value.message


def test_results_come_in_rank_order():
    assert run_locally(ranks, 2) == [0, 1]


def writes_its_number_and_sleeps(folder: str) -> None:
    Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    time.sleep(900)


def alive(number: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_ranks_end_with_a_killed_parent(tmp_path):
    parent = forking_context().Process(target=run_locally, args=(writes_its_number_and_sleeps, 2, str(tmp_path)))
    parent.start()
    files, end = [tmp_path / "0", tmp_path / "1"], time.monotonic() + 300
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < end:
        time.sleep(0.05)
    numbers = [int(file.read_text()) for file in files]
    assert all(alive(number) for number in numbers)
    parent.kill()
    parent.join()
    end = time.monotonic() + 300
    while any(alive(number) for number in numbers) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(number) for number in numbers)
