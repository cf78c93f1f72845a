"""Replays of three production jobs with stragglers: what sharing the work anew reaches, and what is possible.

python -m bench.rebalance > bench/measured/rebalance.md

Seconds of deciding are processor time of one core. Data: tests/data/stragglers.
"""

from __future__ import annotations

from pathlib import Path

from bench.published.rebalance import Job, as_run, rebalance, step_seconds
from bench.published.rebalance.sequences import Sequences, as_measured, deal_out, seconds_of
from bench.published.rebalance.traces import read_job
from shardwright.files import read_json

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "stragglers"


def main() -> None:
    print("| job | moves | step, s | of as run | possible, s | regained of what is possible | decided in, s | answer |")
    print("|---|---|--:|--:|--:|--:|--:|---|")
    for name in ("AR", "ST"):
        path = DATA / f"{name}.json"
        running, measured = read_job(path), read_json(path)
        assert isinstance(running, Job)
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
    path = DATA / "SE.json.xz"
    sequences, measured = read_job(path), read_json(path)
    assert isinstance(sequences, Sequences)
    steps = range(sequences.shape[0])
    before = sum(seconds_of(sequences, step, as_measured(sequences)) for step in steps) / len(steps)
    found = deal_out(sequences)
    regained = 100 * (before - found.cost) / (before - found.lower_bound)
    listed = measured["reference"]["microbatches_reassigned_lpt_1f1b"]
    print(f"| SE | none (measured {measured['mean_measured']:.2f}) | {before:.3f} | 1.000 | | | | |")
    print(f"| SE | sequences, longest first | {found.cost:.3f} | {found.cost / before:.3f} | {found.lower_bound:.3f} "
          f"| {regained:.1f} % | {found.seconds:.2f} | listed for longest first: {listed} |")  # fmt: skip


if __name__ == "__main__":
    main()
