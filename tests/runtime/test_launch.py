"""Local processes end together, and the one that failed first is named."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardwright.errors import RunError
from shardwright.runtime.launch import run_locally


def second_rank_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no luck")
    dist.barrier()


def ranks() -> int:
    return dist.get_rank()


def test_the_cause_is_named():
    with pytest.raises(RunError) as caught:
        run_locally(second_rank_fails, 2, seconds=60)
    assert "Rank 1 failed: ValueError: no luck" in caught.value.message
    assert "\n" not in caught.value.message


def test_results_come_in_rank_order():
    assert run_locally(ranks, 2, seconds=60) == [0, 1]
