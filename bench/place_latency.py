"""Latency of one sample against the published baselines, with a bound.

    python bench/place_latency.py [--time-limit 60] [--subgraphs 1] [--folder FOLDER]

"greedy" is measured in the same run: accelerators filled with what fits their memory along a topological order, best of
three orders (the listed greedy used one). Communication costs here are those of the latency graphs, 1000 times larger on
the layer graphs than in the throughput files of the same models.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.search.place import latency_violations, place, read_workload

LISTED = {  # greedy, latency of the throughput optimum
    "layer_bert24_inference": (100.219, 108.031),
    "layer_gnmt_inference": (268.5, 244.331),
    "op_bert_l-3_inference": (416.204, 414.441),
    "op_resnet50_inference": (839.536, 1123.653),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    folder = Path(__file__).resolve().parents[1] / "tests/data/place/latency"
    parser.add_argument("--folder", type=Path, default=folder)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--subgraphs", type=int, default=1)
    arguments = parser.parse_args()
    failures = 0
    print(
        f"{'workload':<24} {'listed greedy':>13} {'listed other':>12} {'greedy':>9} {'found':>9} {'ratio':>7} {'bound':>9} "
        f"{'gap':>8} {'optimal':>7} {'s':>6}"
    )
    for name, listed in LISTED.items():
        workload = read_workload(arguments.folder / f"{name}.json.xz")
        greedy = place(workload, "latency", solver="greedy", subgraphs=arguments.subgraphs)
        found = place(workload, "latency", subgraphs=arguments.subgraphs, time_limit=arguments.time_limit)
        valid = not latency_violations(workload, found.answer, arguments.subgraphs)
        failures += not (valid and found.cost < min(listed)) or (name == "layer_bert24_inference" and not found.optimal)
        print(
            f"{name:<24} {listed[0]:>13} {listed[1]:>12} {greedy.cost:>9.3f} {found.cost:>9.3f} "
            f"{found.cost / greedy.cost:>7.4f} {found.lower_bound:>9.3f} {100 * found.gap:>7.2f}% {found.optimal!s:>7} "
            f"{found.seconds:>6.1f}",
            flush=True,
        )
    return failures


if __name__ == "__main__":
    sys.exit(main())
