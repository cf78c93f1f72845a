"""How many lines of Python each package has, at a commit and in the working tree.

python -m bench.size COMMIT > bench/measured/size.md

All lines of ``src/shardwright/**/*.py``, with blank ones, comments and docstrings. *Importers* (``exchange``: other engines'
configurations read and written) and *input tables* (``zoo``: models; the operators' ``families``: descriptions) are rows of
their own: they grow with what others publish.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = "src/shardwright"
APART = ("exchange", "zoo", "operators/families")


def package(path: str) -> str:
    """The package of a file, or which of those apart it belongs to.

    >>> package("src/shardwright/operators/families/views.py"), package("src/shardwright/errors.py")
    ('operators/families', 'single modules')
    """
    inside = path.removeprefix(f"{SOURCE}/")
    apart = next((name for name in APART if inside.startswith(f"{name}/")), None)
    return apart or (inside.partition("/")[0] if "/" in inside else "single modules")


def at(commit: str) -> Counter[str]:
    """Lines by package at a commit."""
    asked = ["git", "grep", "-c", "", commit, "--", f"{SOURCE}/*.py"]
    counted = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: Counter[str] = Counter()
    for line in counted.splitlines():
        _, path, count = line.rsplit(":", 2)
        found[package(path)] += int(count)
    return found


def now() -> Counter[str]:
    """Lines by package in the working tree."""
    found: Counter[str] = Counter()
    for path in (ROOT / SOURCE).rglob("*.py"):
        found[package(str(path.relative_to(ROOT)))] += len(path.read_text().splitlines())
    return found


def main() -> None:
    commit = sys.argv[1]
    before, after = at(commit), now()
    print(f"| package | lines at {commit} | lines now |")
    print("|---|--:|--:|")
    names = sorted({*before, *after} - set(APART), key=lambda name: -after[name])
    for name in names:
        print(f"| {name} | {before[name]:,} | {after[name]:,} |")
    print(f"| **together** | {sum(before[n] for n in names):,} | {sum(after[n] for n in names):,} |")
    for name in APART:
        print(f"| {name} | {before[name]:,} | {after[name]:,} |")
    print(f"| **all** | {before.total():,} | {after.total():,} |")


if __name__ == "__main__":
    main()
