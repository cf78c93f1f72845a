"""``shardwright run --assist``: a script that knows nothing of it is watched, helped, and drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import shardwright
from shardwright.errors import FileError, RunError
from shardwright.reports.assistance import draw_events, events_of, picture
from shardwright.reports.drawing import Box
from shardwright.runtime.assistant import ask_for
from shardwright.runtime.assistant.events import Diary, Event

SCRIPT = """
import time, torch, torch.distributed as dist
import shardwright
dist.init_process_group("gloo")
torch.manual_seed(0)
model = shardwright.parallelize(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 16)
for step in range(24):
    time.sleep(0.24 if dist.get_rank() == 1 else 0.06)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_a_slow_rank_is_relieved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    options = {"search": "data-parallel", "baselines": (), "fewer_devices": False}
    plan = shardwright.plan(model, (torch.randn(32, 16),), cluster="local:2", **options)
    plan.save(tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "shardwright", "run", "plan.json", "--assist", "--events", "events.jsonl"]
    ran = subprocess.run([*command, "--", "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "rank 1 is" in ran.stderr and "× slower since step" in ran.stderr
    # Its time does not depend on its rows, so either is right: whatever the clocks say of the update decides.
    assert "moved" in ran.stderr or "went on without it" in ran.stderr
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    moves = [event for event in events if event["event"] == "moved"]
    assert moves[0]["rank"] == 1 and moves[0]["rows_before"] == [16, 16] and moves[0]["rows"][1] < 16
    rounded = (1 + 1e-9) * moves[0]["expected_seconds"]  # both are sums, in different orders
    assert moves[0]["possible_seconds"] <= rounded < moves[0]["step_seconds"]
    assert "events.svg" in ran.stdout and (tmp_path / "events.svg").is_file()


def test_events_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    diary = Diary(path)
    diary.observe(Event("observed", 10, (16, 16), (16, 16), (1.0, 1.8), step_seconds=1.3))
    diary.observe(Event("observed", 12, (16, 16), (16, 16), (1.0, 1.8), step_seconds=1.3))  # too soon after the first
    move = Event("moved", 20, (16, 16), (21, 11), (1.0, 1.8), 1, 11, 1.31, 1.02, 0.97, 0.4)
    diary.tell(move)
    diary.tell(Event("reached", 26, (21, 11), (21, 11), (1.0, 1.8), 1, 11, 1.04, 1.02, 0.97))
    found = events_of(path)
    assert [event.step for event in found] == [10, 20, 26] and found[1] == move
    boxes = [item for item in picture(found).items if isinstance(item, Box)]
    assert {str(move), "rank 0: 21 rows", "rank 1: 16 rows"} <= {box.hint for box in boxes}
    assert all(box.width > 0 and box.height > 0 for box in boxes)
    assert ElementTree.fromstring(draw_events(path).read_text()).tag.endswith("svg")
    (tmp_path / "empty").write_text("")
    assert "no steps" in picture(events_of(tmp_path / "empty")).svg()


@pytest.mark.parametrize("line", ["{", "[]", '{"event": "moved"}'])
def test_other_files_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "other").write_text(line)
    with pytest.raises(FileError, match="line 1 of"):
        events_of(tmp_path / "other")


def test_what_cannot_be_asked_for_is_refused() -> None:
    with pytest.raises(RunError, match="cannot 'sleep'"):
        ask_for("sleep", None)
    with pytest.raises(RunError, match="no events without an assistant"):
        ask_for(None, Path("events.jsonl"))
