"""Exact elimination on PaSE's own cost tables, beside the times of PaSE's own program.

    python bench/choose_pase.py [FOLDER]

FOLDER (default ``tests/data/pase``) holds the tables. Reading files is not counted; each time is the best of five.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shardwright.search.choose import read_problem, solve

LISTED = {  # optimum, seconds of PaSE's program (the paper's where marked in the data's README)
    "alexnet-p8": (9.70983e10, 0.45),
    "alexnet-p64": (4.11205e10, 1.4),
    "rnnlm-p8": (4.02496e12, 0.14),
    "rnnlm-p64": (9.35819e11, None),
    "inception3-p8": (7.82141e11, 24.5),
    "transformer-p8": (1.42108e12, 28.8),
    "transformer-p16": (1.00499e12, 131.0),
}


def main() -> int:
    default = Path(__file__).resolve().parents[1] / "tests/data/pase"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    print(f"{'table':<16} {'cost':>12} {'listed':>12} {'optimal':>8} {'seconds':>9} {'PaSE s':>7} {'ratio':>8}")
    failures = 0
    for name, (optimum, listed) in LISTED.items():
        problem = read_problem(folder / f"pase-{name}.json.xz")
        seconds = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            solution = solve(problem)
            seconds = min(seconds, time.perf_counter() - started)
        same = abs(solution.cost / optimum - 1) < 1e-5 and solution.optimal
        failures += not same
        ratio = f"{listed / seconds:>8.0f}" if listed else f"{'-':>8}"
        print(
            f"{name:<16} {solution.cost:>12.6g} {optimum:>12.6g} {solution.optimal!s:>8} {seconds:>9.4f} "
            f"{listed or '-':>7} {ratio}"
        )
    return failures


if __name__ == "__main__":
    sys.exit(main())
