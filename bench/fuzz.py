"""Damaged plans, clusters, problems, checkpoints, caches and command lines: 10,000 cases, each fault counted.

``python -m bench.fuzz [CASES] [SEED]``. A case is a fault if it ends in anything but a result or one sentence, takes more
than 10 s of processor time or more than 2 GB, writes a file outside its folder, or runs code. See tests/fuzz. The cases
come in rounds of 500 with seeds of their own; after each the table so far is printed, so that a run may be ended early.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
ROUND = 500


def main() -> None:
    from fuzz.fuzzer import Result, fuzz
    from fuzz.targets import TARGETS

    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    totals = {target.name: Result(target.name) for target in TARGETS}
    for seed in range(first, first + -(-cases // ROUND)):
        for target in TARGETS:
            result, total = fuzz(target, round(ROUND * target.share), seed), totals[target.name]
            total.cases += result.cases
            total.seconds += result.seconds
            total.slowest = max(total.slowest, result.slowest)
            for what, (count, case) in result.faults.items():
                total.faults[what] = total.faults.get(what, (0, case))[0] + count, case
        print(f"\nAfter seed {seed}:\n\n{_table(list(totals.values()))}", flush=True)
    sys.exit(1 if any(total.faults for total in totals.values()) else 0)


def _table(totals: list) -> str:
    lines = ["| what is damaged | cases | processor seconds | slowest case | faults |", "|---|---:|---:|---:|---:|"]
    for t in totals:
        faults = sum(count for count, _ in t.faults.values())
        lines.append(f"| {t.name} | {t.cases} | {t.seconds:.0f} | {t.slowest:.1f} s | {faults} |")
    lines.append(f"\n{sum(len(t.faults) for t in totals)} kinds of fault in {sum(t.cases for t in totals)} cases.")
    lines += [f"{count}x {t.name}: {what}\n    {case}" for t in totals for what, (count, case) in t.faults.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
