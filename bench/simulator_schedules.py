"""Bubble rates of 1F1B pipelines by event simulation, beside the published ones and the textbook formula.

python bench/simulator_schedules.py [folder with bubble_rates.csv]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from shardwright.schedules import one_f_one_b, pipeline, run

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "schedules"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    with open(folder / "bubble_rates.csv") as file:
        rows = list(csv.DictReader(file))
    print(f"{'stages':>7}{'micro':>7}{'published':>11}{'simulated':>11}{'difference':>12}{'textbook':>10}")
    worst = 0.0
    for row in rows:
        stages, microbatches = int(row["stages"]), int(row["microbatches"])
        backward = float(row["backward_input_ms"]) + float(row["backward_weight_ms"])
        priced = pipeline(range(stages), microbatches, float(row["forward_ms"]), backward, 0.0, float(row["hop_ms"]))
        timing = run(one_f_one_b(stages, microbatches), priced)
        published = float(row["one_f_one_b"])
        textbook = (stages - 1) / (microbatches + stages - 1)
        worst = max(worst, abs(timing.bubble - published))
        difference = timing.bubble - published
        print(
            f"{stages:>7}{microbatches:>7}{published:>11.4f}{timing.bubble:>11.4f}{difference:>12.5f}{textbook:>10.4f}"
        )
    print(f"largest difference {worst:.5f}")


if __name__ == "__main__":
    main()
