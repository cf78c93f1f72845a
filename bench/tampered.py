"""Tampered plans and checkpoints, run to the end: each computes the right numbers or is refused by one of our errors.

``python -m bench.tampered [CASES] [FIRST] [plans|checkpoints]`` runs as many of each kind (200), beginning with case FIRST.
Plans run on two processes beside the same model on one (tests/fuzz/tampering.py says what is changed). A case is a fault if
the numbers differ, if it ends in anything but a result or one of our errors, if the two processes come to different ends,
if they wait for ever, or if anything was executed or written.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
SECONDS = 60.0
"""How long processes may wait without working."""


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    kinds = sys.argv[3:] or ["plans", "checkpoints"]
    warnings.simplefilter("ignore")
    faults = sum(_plans(first, cases) if kind == "plans" else _checkpoints(first, cases) for kind in kinds)
    sys.exit(1 if faults else 0)


def _plans(first: int, cases: int) -> int:
    from fuzz.tampering import RIGHT, case, plans, tampered_plan
    from runtime.pool import PAIR

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        for text in plans():  # those that nobody has changed
            assert PAIR.run(case, 0, text.encode(), folder) == [RIGHT] * 2
        found: Counter[tuple[str, str]] = Counter()
        for number in range(first, first + cases):
            kind, text = tampered_plan(number)
            found[kind, _outcome(number, kind, text, folder)] += 1
    PAIR.close()
    return _table("plans", found)


def _outcome(number: int, kind: str, text: bytes, folder: str) -> str:
    from fuzz.tampering import case
    from runtime.pool import PAIR, WorkerError

    try:
        ends = PAIR._run(case, (number, text, folder), SECONDS)
    except WorkerError as error:
        said = [line for line in str(error).splitlines() if re.match(r"worker \d|[\w.]*(Error|Exception)", line)]
        places = re.findall(r'shardwright/([\w/]+\.py)", line (\d+)', str(error))
        ends = [f"fault: {(said or ['?'])[0][:200]} at {':'.join(places[-1]) if places else 'nowhere of ours'}"]
    outcome = ends[0] if len(set(ends)) == 1 else f"fault: the processes end otherwise: {ends}"
    if outcome not in ("right", "refused"):
        print(f"case {number} ({kind}): {outcome}", flush=True)
    return outcome


def _checkpoints(first: int, cases: int) -> int:
    from fuzz.tampering import run_checkpoint, save_for

    found: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        good, scratch = Path(folder) / "good", Path(folder) / "scratch"
        save_for(good)
        for number in range(first, first + cases):
            try:
                kind, outcome = run_checkpoint(good, number, scratch)
            except Exception as error:  # what the bench is there to count
                kind, outcome = "?", f"fault: {type(error).__name__}: {str(error)[:200]}"
            if outcome not in ("right", "refused"):
                print(f"case {number} ({kind}): {outcome}", flush=True)
            found[kind, outcome] += 1
        assert {path.name for path in Path(folder).iterdir()} == {"good", "scratch"}, "something was written"
    return _table("checkpoints", found)


def _table(what: str, found: Counter[tuple[str, str]]) -> int:
    print(f"\n| {what}: what was changed | right numbers | refused | faults |\n|---|---:|---:|---:|")
    kinds = sorted({kind for kind, _ in found})
    rows = {kind: Counter({end: count for (one, end), count in found.items() if one == kind}) for kind in kinds}
    rows["all"] = sum(rows.values(), Counter())
    for kind, ends in rows.items():
        faults = ends.total() - ends["right"] - ends["refused"]
        print(f"| {kind} | {ends['right']} | {ends['refused']} | {faults} |")
    print(flush=True)
    return rows["all"].total() - rows["all"]["right"] - rows["all"]["refused"]


if __name__ == "__main__":
    main()
