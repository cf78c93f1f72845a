"""``shardwright check`` on parallel code of others: silent on correct programs, every planted mistake noticed and named.

    python -m bench.foreign_faults [--only pipeline] [-o bench/measured/foreign/rows.jsonl]
    python -m bench.foreign_faults --table              # from the stored rows

The programs are those of :mod:`bench.foreign_programs`, plain PyTorch, each on local processes of its own (gloo, float64). A
mistake counts as noticed when the check does not agree, and as named when the first cause it gives is the one that was
planted. A part of them runs in the tests.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from foreign_programs import FAULTS, PROGRAMS, Program

STORED = Path(__file__).resolve().parent / "measured" / "foreign" / "rows.jsonl"


def checked(name: str, program: Program) -> dict[str, Any]:
    """What the check says of one program."""
    from shardwright.errors import ShardwrightError
    from shardwright.verification.candidates import check_candidate

    row: dict[str, Any] = {"program": name, "processes": program.processes, "planted": program.cause or None}
    began = time.perf_counter()
    try:
        found = check_candidate(program.model, program.build, processes=program.processes)
    except ShardwrightError as error:
        return row | {"error": error.message, "seconds": time.perf_counter() - began}
    first = found.findings[0] if found.findings else None
    return row | {
        "agrees": found.agrees,
        "cause": first.cause if first else None,
        "sentence": first.sentence if first else None,
        "numbers": found.verification.as_dict()["compared"],
        "seconds": time.perf_counter() - began,
    }


def right(row: dict[str, Any]) -> bool:
    """Whether a correct program was passed over in silence, or a mistake named."""
    return row.get("agrees", False) if row["planted"] is None else row.get("cause") == row["planted"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What became of every program, and the counts."""
    lines = ["| program | processes | planted | said | |", "|---|--:|---|---|---|"]
    for row in rows:
        said = row.get("error") or ("nothing" if row["agrees"] else row["cause"] or "differs, no cause")
        verdict = "right" if right(row) else "**wrong**"
        lines.append(f"| {row['program']} | {row['processes']} | {row['planted'] or '–'} | {said} | {verdict} |")
    sound, faulty = ([row for row in rows if (row["planted"] is None) == kind] for kind in (True, False))
    noticed = sum(not row.get("agrees", True) for row in faulty)
    lines += [
        "",
        f"Correct programs: {sum(map(right, sound))} of {len(sound)} passed over in silence. Mistakes: {noticed} of ",
    ]
    lines[-1] += f"{len(faulty)} noticed, {sum(map(right, faulty))} with the cause that was planted."
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose name has this in it")
    parser.add_argument("-o", "--output", type=Path, help="store the rows here")
    parser.add_argument("--table", action="store_true", help="print the stored rows")
    asked = parser.parse_args()
    if asked.table:
        print(table([json.loads(line) for line in STORED.read_text().splitlines()]))
        return
    rows = []
    for name, program in {**PROGRAMS, **FAULTS}.items():
        if asked.only in name:
            rows.append(checked(name, program))
            print(
                f"{'right' if right(rows[-1]) else 'WRONG'} {name} ({rows[-1]['seconds']:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
            if asked.output is not None:
                asked.output.parent.mkdir(parents=True, exist_ok=True)
                asked.output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(table(rows))


if __name__ == "__main__":
    main()
