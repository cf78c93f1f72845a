"""Schedules to and from the CSV files of torch.distributed.pipelining, checked with torch's own reader and simulator."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
)

from shardwright.errors import ProblemError
from shardwright.schedules import RECIPES, Schedule, known_schedule, pipeline, read_csv, run, stage_devices, write_csv


def _stages(stages: int, devices: int, shape: str) -> list[SimpleNamespace]:
    """What torch's schedules ask of the stages of rank 0."""
    return [
        SimpleNamespace(
            stage_index=stage,
            num_stages=stages,
            group_size=devices,
            group_rank=0,
            is_last=stage == stages - 1,
            has_backward=False,
            submod=None,
        )
        for stage, device in enumerate(stage_devices(devices, stages, shape))
        if device == 0
    ]


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("microbatches", [2, 9])
def test_torch_reads_and_simulates_what_we_write(name: str, microbatches: int, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    devices, per_device = 4, recipe.stages_per_device or 2
    schedule = known_schedule(name, devices * per_device, microbatches, devices)
    write_csv(schedule, tmp_path / "ours.csv")
    assert read_csv(tmp_path / "ours.csv") == schedule

    theirs = _PipelineScheduleRuntime(_stages(schedule.stages, devices, recipe.shape), microbatches)
    theirs._load_csv(str(tmp_path / "ours.csv"), format="compute_only")  # validates and adds sends and receives
    assert tuple(theirs.stage_index_to_group_rank[s] for s in range(schedule.stages)) == schedule.device_of
    theirs._dump_csv(str(tmp_path / "comms.csv"), format="compute_comms")
    for actions in theirs.pipeline_order_with_comms.values():  # torch's simulator does not know these
        actions[:] = [a for a in actions if a.computation_type.value not in ("UNSHARD", "RESHARD", "REDUCE_GRAD")]
    theirs._simulate()  # raises where ranks would wait for ever

    assert "SEND_F" in (tmp_path / "comms.csv").read_text()
    assert read_csv(tmp_path / "comms.csv") == schedule


@pytest.mark.parametrize(
    ("theirs", "name", "shape"),
    [
        (ScheduleInterleaved1F1B, "interleaved-1f1b", "loop"),
        (ScheduleLoopedBFS, "breadth-first", "loop"),
        (ScheduleDualPipeV, "dualpipe-v", "v"),
        (ScheduleZBVZeroBubble, None, "v"),
    ],
)
def test_we_read_what_torch_writes(theirs: type, name: str | None, shape: str, tmp_path: Path) -> None:
    """Its interleaved, breadth-first and DualPipe-V orders are ours, action by action; its ZB-V is another order."""
    made = theirs(_stages(8, 4, shape), 12)
    made._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    schedule = read_csv(tmp_path / "theirs.csv")
    if name is not None:
        assert schedule == known_schedule(name, 8, 12, 4)
    assert run(schedule, pipeline(schedule.device_of, 12)).makespan > 0
    made._dump_csv(str(tmp_path / "comms.csv"), format="compute_comms")
    assert read_csv(tmp_path / "comms.csv") == schedule


def test_cells_nobody_knows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("0F0,0Q0\n")
    with pytest.raises(ProblemError, match="'0Q0' is not an action"):
        read_csv(tmp_path / "odd.csv")
    with pytest.raises(ProblemError, match="Cannot read"):
        read_csv(tmp_path / "absent.csv")


def test_overlapped_pairs_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "pair.csv").write_text("0F0,,(0F1;0B0)OVERLAP_F_B,0REDUCE_GRAD,0B1\n")
    assert read_csv(tmp_path / "pair.csv") == Schedule.parse("0F0 0F1 0B0 0B1")
