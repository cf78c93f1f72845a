"""Damaged plans, clusters, problems, checkpoints, caches and command lines: 10,000 cases, each fault counted.

``python -m bench.fuzz [CASES] [SEED]``. A case is a fault if it ends in anything but a result or one sentence, takes more
than 10 s of processor time or more than 2 GB, writes a file outside its folder, or runs code. See tests/fuzz.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> None:
    from fuzz.fuzzer import fuzz
    from fuzz.targets import TARGETS

    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    total = wrong = 0
    print(
        "| what is damaged | cases | processor seconds | slowest case | faults |\n|---|---:|---:|---:|---:|", flush=True
    )
    kept = []
    for target in TARGETS:
        result = fuzz(target, round(cases * target.share), seed)
        faults = sum(count for count, _ in result.faults.values())
        total, wrong = total + result.cases, wrong + faults
        print(
            f"| {target.name} | {result.cases} | {result.seconds:.0f} | {result.slowest:.1f} s | {faults} |", flush=True
        )
        kept += [(target.name, count, what, case) for what, (count, case) in result.faults.items()]
    print(f"\n{wrong} faults in {total} cases (seed {seed}).")
    for name, count, what, case in kept:
        print(f"{count}x {name}: {what}\n    {case}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
