"""The released package in clean environments: ``python -m bench.package PYTHON...`` with the wheel installed in each.

Every PYTHON is an interpreter into which nothing but the wheel and its dependencies was installed:

    python -c "from setuptools import build_meta as b; b.build_wheel('dist')"
    python3.12 -m venv clean && clean/bin/pip install dist/*.whl && python -m bench.package clean/bin/python

In an empty folder each is asked for its versions, to import the package, to list models, to plan, to draw the plan, and to
train it on two processes beside one. Kept: what was printed, and the processor seconds (three runs, the least).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import tempfile
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parent / "measured" / "package" / "environments.json"
IMPORT = ["-c", "import shardwright"]
MODELS = ["-m", "shardwright", "models"]
STEPS: tuple[tuple[int, list[str]], ...] = (
    (
        1,
        ["-c", "import platform, torch, shardwright; print(platform.python_version(), torch.__version__, shardwright)"],
    ),
    (1, ["-m", "shardwright", "--version"]),
    (3, ["-c", "pass"]),
    (3, IMPORT),
    (3, MODELS),
    (1, ["-m", "shardwright", "plan", "gpt:small", "--cluster", "4xH100", "-o", "plan.json"]),
    (1, ["-m", "shardwright", "report", "plan.json", "-o", "plan.html"]),
    (1, ["-m", "shardwright", "verify", "gpt:small", "--cluster", "local:2", "--search", "fsdp", "--dtype", "float64"]),
)


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def smoke(python: Path) -> list[dict[str, Any]]:
    """What every step printed, and what it took."""
    rows, environment = [], str(python.parents[1])
    with tempfile.TemporaryDirectory() as folder:
        clean = {**os.environ, "SHARDWRIGHT_CACHE": f"{folder}/cache", "COLUMNS": "80"}

        def said(text: str) -> str:
            return text.replace(folder, ".").replace(environment, "ENVIRONMENT")

        for runs, words in STEPS:
            taken = []
            for _ in range(runs):
                before = processor_seconds()
                done = subprocess.run([python, *words], cwd=folder, env=clean, capture_output=True, text=True)
                taken.append(processor_seconds() - before)
            row = {"arguments": words, "exit": done.returncode, "processor_seconds": round(min(taken), 3)}
            rows.append(row | {"printed": said(done.stdout), "errors": said(done.stderr)[-2000:]})
            print(f"  {' '.join(words)[:70]:70} exit {done.returncode}  {min(taken):6.2f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", type=Path, help="interpreters of clean environments")
    parser.add_argument("--packages", action="store_true", help="keep what pip lists too")
    given = parser.parse_args()
    found = {}
    for python in given.pythons:
        python = python.absolute()
        print(python)
        asked = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.strip()
        found[asked] = {"date": str(datetime.date.today()), "steps": smoke(python)}
        if given.packages:
            listed = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
            found[asked]["packages"] = [line for line in listed.splitlines() if "file:" not in line]
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        KEPT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
