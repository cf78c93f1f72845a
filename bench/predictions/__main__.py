"""``make predictions``: what is predicted now beside what was stored; ``make predictions STORE="why"`` stores it.

python -m bench.predictions [CASE …] [--store WHY]     # cases by name or pattern; all of them otherwise
python -m bench.predictions --listing CASE             # what every kind of rank of a stored plan does, to be diffed
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatch
from time import process_time

from shardwright.program.listing import listed

from .rows import Row, opened, plan_row, rank_lines
from .searches import SEARCHES, searched
from .table import HERE, Move, comparable, lines, log, moves, read, write

PLANS = HERE / "plans"


def names(kind: str) -> list[str]:
    """All cases of a table."""
    return sorted(path.stem for path in PLANS.glob("*.json")) if kind == "plans" else sorted(SEARCHES)


def computed(kind: str, name: str) -> Row:
    """The row of a case as it is now."""
    return plan_row(PLANS / f"{name}.json") if kind == "plans" else searched(name)


def listing(name: str) -> None:
    """Every instruction of every rank, without what moves with each of its neighbours."""
    plan, graph = opened(PLANS / f"{name}.json")
    for rank in range(plan.devices):
        print(f"rank {rank}")
        for row in listed(rank_lines(plan, graph, rank)):
            print("  ", *(f"{key}={row[key]}" for key in row if key not in ("number", "frees")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names or patterns")
    parser.add_argument("--store", metavar="WHY", help="store the new values, with the reason")
    parser.add_argument("--listing", metavar="CASE", help="print the instructions of a stored plan instead")
    asked = parser.parse_args()
    if asked.listing:
        listing(asked.listing)
        return 0
    if asked.store is not None and not asked.store.strip():
        parser.error("say why: --store 'the reason'")
    found: list[Move] = []
    for kind in ("plans", "searches"):
        stored = read(kind)
        rows = dict(stored) if asked.cases else {}
        for name in names(kind):
            if asked.cases and not any(fnmatch(name, pattern) for pattern in asked.cases):
                continue
            begun = process_time()
            rows[name] = computed(kind, name)
            print(f"{kind} {name}: {process_time() - begun:.1f} s", file=sys.stderr, flush=True)
            found += moves(stored.get(name), rows[name])
        for name in stored.keys() - set(names(kind)):
            found += moves(stored[name], rows.pop(name, None))
        if asked.store is not None:
            write(kind, rows.values())
    told = found if asked.store is not None else comparable(found)
    if not told:
        print("Every prediction is as it was stored.")
        return 0
    print("\n".join(lines(told)))
    cases = len({move.case for move in told})
    if asked.store is not None:
        log(asked.store, told)
        print(f"{cases} cases stored.")
        return 0
    print(f'{cases} cases moved. If that is as it should be: make predictions STORE="why".')
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
