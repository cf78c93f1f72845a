"""PipeDream's profiles on 4 devices at 1.25e9 bytes/s, stages replicated: the published times and replication.

    python bench/place_replication.py [--folder FOLDER]

"beside": transfers between stages run beside the computation, each direction on its own, which reproduces the published
answers. "none": transfers ignored, under which better pipelines exist. The reference in the same run is the best straight
pipeline (no replication) with transfers beside the computation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.search.place import Rules, read_profile, violations
from shardwright.search.place.contiguous import place_contiguous

LISTED = {
    "vgg16": (0.1763, "3+1"),
    "alexnet": (0.03246, "3+1"),
    "resnet50": (0.15199, "2+2"),
    "gnmt": (0.025868, "1+1+1+1"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parents[1] / "tests/data/pipedream")
    arguments = parser.parse_args()
    failures = 0
    print(
        f"{'profile':<9} {'listed':>9} {'':<8} {'beside':>10} {'':<8} {'none':>10} {'':<8} "
        f"{'straight':>10} {'ratio':>7} {'s':>7}"
    )
    place_contiguous(read_profile(arguments.folder / "vgg16.txt", devices=4, bandwidth=1.25e9), Rules(replicate=True))
    for name, (seconds, replicas) in LISTED.items():
        path = arguments.folder / f"{name}.txt"
        workload = read_profile(path, devices=4, bandwidth=1.25e9)
        beside = place_contiguous(workload, Rules(replicate=True, overlap=True))
        silent = read_profile(path, devices=4, bandwidth=1.25e9, transfers=False)
        without = place_contiguous(silent, Rules(replicate=True))
        straight = place_contiguous(workload, Rules(overlap=True))
        shape, free = ("+".join(str(len(s.devices)) for s in f.answer.stages) for f in (beside, without))
        failures += not (
            beside.cost <= seconds * 1.001 and shape == replicas and not violations(workload, beside.answer)
        )
        print(
            f"{name:<9} {seconds:>9} {replicas:<8} {beside.cost:>10.6f} {shape:<8} {without.cost:>10.6f} {free:<8} "
            f"{straight.cost:>10.6f} {beside.cost / straight.cost:>7.3f} {beside.seconds:>7.4f}"
        )
    return failures


if __name__ == "__main__":
    sys.exit(main())
