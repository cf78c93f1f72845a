"""Where the public figures for schedules lie, and the pipelines they describe."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.schedules import Action, Pipeline, Schedule, pipeline, stage_devices

DATA = Path(__file__).resolve().parents[1] / "data" / "schedules"


def zero_bubble_rows() -> Iterator[tuple[Mapping[str, str], Pipeline]]:
    """The rows of ``zero_bubble.csv``, each with its pipeline; times in microseconds."""
    with open(DATA / "zero_bubble.csv") as file:
        for row in csv.DictReader(file):
            devices, chunks = int(row["stages"]), int(row["chunks_per_stage"])
            mem = int(row["mem_f"])
            yield (
                row,
                pipeline(
                    stage_devices(devices, devices * chunks, "loop" if chunks == 1 else "v"),
                    int(row["microbatches"]),
                    int(row["f_us"]),
                    int(row["b_us"]),
                    int(row["w_us"]),
                    int(row["comm_us"]),
                    mem,
                    int(row["mem_b"]),
                    int(row["mem_w"]),
                    int(row["memory_cap_in_mem_f"]) * mem,
                ),
            )


def profiles() -> Iterator[tuple[str, Mapping[str, Any], Pipeline]]:
    """The problems of ``zero_bubble_profiles.json`` at each of their limits: name, the listed result, the pipeline."""
    for case in json.loads((DATA / "zero_bubble_profiles.json").read_text()):
        for listed in case["zb_scheduler"]:
            yield (
                f"{case['name']} at {listed['memory_limit']}",
                listed,
                pipeline(
                    range(case["stages"]),
                    case["microbatches"],
                    case["forward"],
                    case["backward_input"],
                    case["backward_weight"],
                    case["comm"],
                    case["mem_f"],
                    case["mem_b"],
                    case["mem_w"],
                    listed["memory_limit"],
                ),
            )


def published_orders() -> dict[str, Schedule]:
    """The orders behind the listed figures: ``row N`` of ``zero_bubble.csv``, and the profiles by name and limit."""
    found = {}
    for name, devices in json.loads((DATA / "published_orders.json").read_text()).items():
        orders = []
        for device, letters in enumerate(devices):
            counts: Counter[str] = Counter()
            order = []
            for letter in letters:
                stage = device if letter.isupper() else 2 * len(devices) - 1 - device
                order.append(Action(stage, letter.upper(), counts[letter]))
                counts[letter] += 1
            orders.append(tuple(order))
        found[name] = Schedule(tuple(orders))
    return found
