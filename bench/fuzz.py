"""Damaged files and odd words for all commands: 10,000 cases, each fault counted.

``python -m bench.fuzz [CASES] [SEED] [--raw FILE]``. A case is a fault if it ends in anything but a result or one sentence,
takes more than 20 s of processor time or more than 2 GB, writes a file outside its folder, or runs code. See tests/fuzz.
The cases come in rounds of 500 with seeds of their own; every target of a round runs in a process of its own (what ends
that process is a fault too) and is one line of FILE, so that a run goes on where it was ended. The table is of all lines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
ROUND = 500
RAW = Path(__file__).parent / "measured" / "robustness" / "fuzz_all_2026-11-18.jsonl"


def main() -> None:
    import torch

    from fuzz.everything import TARGETS

    asked = argparse.ArgumentParser()
    asked.add_argument("cases", nargs="?", type=int, default=10_000)
    asked.add_argument("seed", nargs="?", type=int, default=0)
    asked.add_argument("--raw", type=Path, default=RAW)
    told = asked.parse_args()
    torch.set_num_threads(1)  # a process that has threads of OpenMP cannot be forked
    known = _lines(told.raw)
    done = {(line["seed"], line["name"]) for line in known}
    for seed in range(told.seed, told.seed + -(-told.cases // ROUND)):
        for target in TARGETS:
            if (seed, target.name) not in done:
                target.prepare()
                line = {"seed": seed, **_apart(target, round(ROUND * target.share), seed)}
                known.append(line)
                with told.raw.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        print(f"\nAfter seed {seed}:\n\n{table(known)}", flush=True)
    sys.exit(1 if any(line["faults"] for line in known) else 0)


def _apart(target, cases: int, seed: int) -> dict:
    """The result of a target in a process of its own."""
    from fuzz.fuzzer import Result, fuzz

    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            json.dump(asdict(fuzz(target, cases, seed)), out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    _, status = os.waitpid(child, 0)
    died = asdict(Result(target.name, cases, faults={f"the process ended with status {status}": (1, "")}))
    return json.loads(text) if text else died


def _lines(raw: Path) -> list[dict]:
    return [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []


def table(lines: list[dict]) -> str:
    """What was damaged, how many cases, what went wrong."""
    rows = ["| what is damaged | cases | processor seconds | slowest case | faults |", "|---|---:|---:|---:|---:|"]
    kinds: dict[str, tuple[int, str]] = {}
    for name in dict.fromkeys(line["name"] for line in lines):
        mine = [line for line in lines if line["name"] == name]
        faults = 0
        for line in mine:
            for what, (count, case) in line["faults"].items():
                faults += count
                kinds[f"{name}: {what}"] = kinds.get(f"{name}: {what}", (0, case))[0] + count, case
        cases, seconds = sum(line["cases"] for line in mine), sum(line["seconds"] for line in mine)
        rows.append(f"| {name} | {cases} | {seconds:.0f} | {max(line['slowest'] for line in mine):.1f} s | {faults} |")
    rows.append(f"\n{len(kinds)} kinds of fault in {sum(line['cases'] for line in lines)} cases.")
    return "\n".join([*rows, *(f"{count}x {what}\n    {case}" for what, (count, case) in kinds.items())])


if __name__ == "__main__":
    main()
