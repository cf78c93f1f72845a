"""Replays of two production jobs with stragglers: what sharing the work anew reaches, and what is possible.

python -m bench.rebalance > bench/measured/rebalance.md

Seconds of deciding are processor time of one core. Data: tests/data/stragglers.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.published.rebalance import as_run, rebalance, step_seconds
from bench.published.rebalance.traces import read_job

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "stragglers"


def main() -> None:
    print("| job | moves | step, s | of as run | possible, s | regained of what is possible | decided in, s | answer |")
    print("|---|---|--:|--:|--:|--:|--:|---|")
    for name in ("AR", "ST"):
        path = DATA / f"{name}.json"
        running, measured = read_job(path), json.loads(path.read_text())
        before = step_seconds(running, as_run(running))
        print(f"| {name} | none (measured {measured['mean_measured']:.2f}) | {before:.3f} | 1.000 | | | | |")
        for layers, blocks in (("fixed", None), ("common", None), ("own", None), ("common", 8), ("own", 8)):
            found = rebalance(running, layers, blocks)
            gain = before - found.lower_bound
            regained = f"{100 * (before - found.cost) / gain:.1f} %" if gain > 1e-6 else "–"
            what = {"fixed": "shares", "common": "shares, one split for all", "own": "shares, own splits"}[layers]
            if blocks:
                what += f", {blocks} blocks a stage"
            print(
                f"| {name} | {what} | {found.cost:.3f} | {found.cost / before:.3f} "
                f"| {found.lower_bound:.3f} | {regained} | {found.seconds:.2f} | {found.answer.describe()} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
