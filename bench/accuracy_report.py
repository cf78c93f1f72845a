"""Writes ``docs/benchmarks/accuracy.md``: errors of predicted steps, from what ``bench/measured`` keeps.

python bench/accuracy.py report                # what was measured on the H200, and the public Megatron rows
python bench/accuracy.py report --local        # also measures and predicts two local processes, now
python bench/accuracy.py local                 # measures and predicts two local processes, rewrites their section only
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import subprocess
from pathlib import Path

import accuracy_local
import accuracy_megatron
import accuracy_ranks
import accuracy_table

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "bench" / "measured"
PAGE = ROOT / "docs" / "benchmarks" / "accuracy.md"
NOTES = Path(__file__).with_name("accuracy_notes.md")


def _printed(function, *args: object) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        function(*args)
    return text.getvalue().strip()


def _local_table(measure: bool) -> str:
    kept = MEASURED / "local.md"
    if measure:
        kept.write_text(_printed(accuracy_local.report, 60.0, 15) + "\n")
    return kept.read_text().strip() if kept.exists() else "Not measured yet: `python bench/accuracy.py report --local`."


LOCAL_TITLE = "## Two local processes"
LOCAL_ABOUT = "Gloo between two processes of one thread each on a 2-core CPU; plans take turns step by step."


PACE = (
    "Each case is measured in 24 repeats on the host's quietest core, with a yardstick (a small training step) before and "
    "after each. *Host's pace* is the yardstick's time over that at calibration (first to last decile); host times of the "
    "prediction are multiplied by it, repeat by repeat, and the error is the median of all repeats. *Pace ignored*: the "
    "prediction as the profile makes it, against the median repeat."
)


def write_local() -> Path:
    """Measure and predict two local processes again and replace their section of the page."""
    before, rest = PAGE.read_text().split(LOCAL_TITLE, 1)
    after = rest[rest.index("\n## ") :]
    PAGE.write_text(f"{before}{LOCAL_TITLE}\n\n{LOCAL_ABOUT}\n\n{_local_table(True)}\n{after}")
    return PAGE


def write(local: bool) -> Path:
    """Predict everything again and write the page."""
    steps = MEASURED / "h200_steps.json"
    about = json.loads(steps.read_text())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    ranks = MEASURED / "h200_ranks.json"
    parts = [
        "# Errors of predictions on our own machines",
        f"Regenerate with `python bench/accuracy.py report` ({datetime.date.today()}, commit {commit.strip()}). "
        f"Measured on one {about['device']} with torch {about['torch']}; predicted from captured graphs and the shipped "
        "profile (`shardwright calibrate`). No model below took part in the calibration; what was settled with these rows "
        "in sight is said at the end.",
        PACE,
        "## One device",
        "Eager training steps with AdamW: forward, backward, optimizer; wall time and the allocator's peak.",
        accuracy_table.table(accuracy_table.compare(steps)),
        "## One rank of eight",
        "Rank 0 of an eight-way plan with the fake process group: collectives take no time, so compute, dispatch and "
        "memory are compared. *Device alone* is the prediction without any host, which is how a recorded step is replayed.",
        accuracy_ranks.predict(MEASURED / "plans", ranks) if ranks.exists() else "Not measured yet.",
        "## The same on a busier machine",
        "Four of these cases on another H200, whose host was 1.1 to 2.9 times slower than the calibrated one.",
        accuracy_table.table(accuracy_table.compare(MEASURED / "h200_busy_steps.json")),
        LOCAL_TITLE,
        LOCAL_ABOUT,
        _local_table(local),
        "## A formula on 1,440 measured Megatron iterations (not the product)",
        "vTrain's table (MICRO 2024), 2 to 8 A100. A closed formula of the benchmark's own with six fitted constants: "
        "nothing is captured, planned or simulated, so this says nothing of Shardwright's predictions. The published "
        "simulator's own error is 8.37 %.",
        _printed(accuracy_megatron.report, accuracy_megatron.DATA, 5),
        NOTES.read_text().strip(),
    ]
    PAGE.write_text("\n\n".join(parts) + "\n")
    return PAGE
