"""Throughput without contiguity: the proved optima of the two BERT graphs, and never worse than contiguous elsewhere.

    python bench/place_noncontiguous.py [NAME …] [--time-limit 90] [--folder FOLDER]

The reference in the same run is the contiguous optimum.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.search.place import read_workload, violations
from shardwright.search.place.contiguous import place_contiguous
from shardwright.search.place.noncontiguous import place_anywhere

LISTED = {"layer_bert24_inference": 17.7147, "layer_bert24_training": 39.7895}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    folder = Path(__file__).resolve().parents[1] / "tests/data/place/throughput"
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=folder)
    parser.add_argument("--time-limit", type=float, default=90.0)
    arguments = parser.parse_args()
    names = arguments.names or sorted(path.name.removesuffix(".json.xz") for path in arguments.folder.glob("*.json.xz"))
    failures = 0
    print(
        f"{'workload':<28} {'contiguous':>12} {'found':>12} {'ratio':>8} {'listed':>9} {'bound':>12} {'gap':>9} {'s':>6}"
    )
    for name in names:
        workload = read_workload(arguments.folder / f"{name}.json.xz")
        contiguous = place_contiguous(workload)
        found = place_anywhere(workload, time_limit=arguments.time_limit)
        listed = LISTED.get(name)
        good = not violations(workload, found.answer, contiguous=False) and found.cost <= contiguous.cost * (1 + 1e-9)
        failures += not (good and (listed is None or found.cost <= listed + 5e-5))
        print(
            f"{name:<28} {contiguous.cost:>12.6f} {found.cost:>12.6f} {found.cost / contiguous.cost:>8.5f} "
            f"{listed or float('nan'):>9} {found.lower_bound:>12.6f} {100 * found.gap:>8.3f}% {found.seconds:>6.1f}",
            flush=True,
        )
    return failures


if __name__ == "__main__":
    sys.exit(main())
