"""What a number in a schedule or about one may ask for: anything beyond is a sentence, at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import ProblemError
from shardwright.schedules import known_schedule, pipeline, read_csv, run, stage_devices
from shardwright.schedules.picture import draw


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n999999999F0", "stage 1 of 1000000000 has no action"),
        ("0F0,0B0,0F999999999", "1000000000 micro-batches"),
        ("0F0,0B0\n99999999999999F0", "is not an action"),
        ("0F" + "9" * 5000, "is not an action"),
        ("0F0,0B0\0", "not an action|is not CSV"),
        ('0F0,"' + "x" * 200_000, "is not CSV"),
    ],
)
def test_a_small_file_asks_for_nothing_large(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "orders.csv").write_text(text)
    with pytest.raises(ProblemError, match=said):
        read_csv(tmp_path / "orders.csv")


def test_bytes_that_are_no_text_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "orders.csv").write_bytes(b"0F0,0B0\xff")
    with pytest.raises(ProblemError, match="not text"):
        read_csv(tmp_path / "orders.csv")


@pytest.mark.parametrize(("stages", "microbatches"), [(10**9, 1), (2, 10**9), (10**30, 10**30), (900, 900), (0, 1)])
def test_sizes_nobody_means_are_refused_before_anything_is_built(stages: int, microbatches: int) -> None:
    for make in (
        lambda: known_schedule("1f1b", stages, microbatches),
        lambda: pipeline(stage_devices(min(stages, 8), stages), microbatches),
    ):
        with pytest.raises(ProblemError):
            make()


@pytest.mark.parametrize(
    "odd",
    [
        {"forward": 1e300},
        {"inputs": float("nan")},
        {"hop": float("inf")},
        {"forward_memory": float("inf")},
        {"limits": float("nan")},
    ],
)
def test_figures_that_are_no_numbers_are_refused(odd: dict[str, float]) -> None:
    with pytest.raises(ProblemError):
        pipeline((0, 1), 2, **odd)  # type: ignore[arg-type]  # one figure each


@pytest.mark.parametrize("hop", [0.0, 1.0])
def test_passes_that_take_no_time_are_drawn(hop: float) -> None:
    order = known_schedule("1f1b", 2, 2)
    lines = draw(run(order, pipeline((0, 1), 2, 0.0, 0.0, 0.0, hop=hop)), 40)
    assert len(lines) == 2
