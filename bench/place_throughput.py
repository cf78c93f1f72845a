"""Contiguous throughput, exact: the published optima, and the seconds the pruning saves.

    python bench/place_throughput.py [--folder FOLDER] [--no-reference]

FOLDER defaults to ``tests/data/place/throughput``. "all pairs" is the published recurrence over all pairs of ideals,
measured in the same run with the same compiled kernel and no threshold; "C++" are the listed seconds of the published
program. Kernels are compiled before the clock starts; seconds are the least of three runs. The communication costs of the
layer graphs are 1000 times smaller than those of the latency graphs of the same models (probably seconds against
milliseconds); they are used as published.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np

from shardwright.search.place import read_workload, violations
from shardwright.search.place.contiguous import ChainSearch, place_contiguous
from shardwright.search.place.heuristics import place_heuristically
from shardwright.search.place.problem import Rules
from shardwright.search.place.reductions import reduce

LISTED: dict[str, tuple[float | None, float | None]] = {  # optimum, seconds of the published program
    "layer_bert24_inference": (17.78990625, 0.01),
    "layer_bert24_training": (41.7458125, 0.01),
    "layer_gnmt_inference": (32.910658203125, 42.0),
    "layer_resnet50_inference": (33.774666015625, 0.14),
    "layer_resnet50_training": (78.6318125, 0.23),
    "layer_inceptionv3_inference": (None, None),
    "op_bert_l-3_inference": (27.9185676799, 1.0),
    "op_bert_l-3_training": (65.3031491221, 5.5),
    "op_bert_l-6_inference": (29.5795058065, 3.2),
    "op_resnet50_inference": (124.348849774, 0.2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    folder = Path(__file__).resolve().parents[1] / "tests/data/place/throughput"
    parser.add_argument("--folder", type=Path, default=folder)
    parser.add_argument("--no-reference", action="store_true", help="leave out the recurrence over all pairs")
    arguments = parser.parse_args()
    warm = read_workload(arguments.folder / "layer_bert24_training.json.xz")
    place_contiguous(warm)
    place_heuristically(warm)
    failures = 0
    print(
        f"{'workload':<28} {'found':>13} {'listed':>13} {'seconds':>8} {'C++':>6} {'ratio':>7} {'all pairs':>9} "
        f"{'ratio':>7} {'ideals':>7} {'kept':>6} {'heuristic':>9} {'s':>6}"
    )
    for name, (optimum, published) in LISTED.items():
        workload = read_workload(arguments.folder / f"{name}.json.xz")
        runs = [place_contiguous(workload) for _ in range(3)]
        found, seconds = runs[0], min(run.seconds for run in runs)
        quick = place_heuristically(workload)
        search = ChainSearch(reduce(workload), Rules())
        search.under(np.array([found.cost * (1 + 1e-9)]))
        visited, kept = search.visited, search.kept
        reference = float("nan")
        if not arguments.no_reference:
            begun = time.perf_counter()
            search.under(np.array([search.everything()]))
            reference = time.perf_counter() - begun
        right = optimum is None or abs(found.cost / optimum - 1) <= 1e-6
        quick_enough = seconds <= (3 * published + 1 if published is not None else 120)
        if name == "layer_gnmt_inference":
            quick_enough = seconds <= 42 / 5
        valid = not violations(workload, found.answer) and quick.cost <= 1.1 * found.cost
        failures += not (right and quick_enough and valid and found.optimal)
        print(
            f"{name:<28} {found.cost:>13.9g} {optimum or float('nan'):>13.9g} {seconds:>8.3f} "
            f"{published or float('nan'):>6.4g} {(published or float('nan')) / seconds:>7.1f} {reference:>9.2f} "
            f"{reference / seconds:>7.1f} {visited:>7,} {kept:>6,} {quick.cost / found.cost:>9.5f} {quick.seconds:>6.3f}",
            flush=True,
        )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB, {failures} failures")
    return failures


if __name__ == "__main__":
    sys.exit(main())
