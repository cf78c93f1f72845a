"""Predicted against performed communication and memory of one rank of four, plan by plan.

Every plan is lowered and run for two steps with PyTorch's fake process group (collectives return at once). Communication is
compared per kind of collective and mesh axis, in tensors and bytes; memory with what PyTorch's CPU allocator reports.

    python bench/simulator_plans.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

RUNNER = Path(__file__).resolve().parents[1] / "tests" / "costs" / "performed.py"
WIDER = {"width": 128, "seq": 64, "vocab": 512, "batch": 8}
SEARCHES = ("data-parallel", "fsdp", "zero-2", "megatron", "megatron-sp", "auto")
CASES = [
    (model, WIDER, search, axes)
    for model in ("gpt", "llama", "bert", "moe")
    for search in SEARCHES
    for axes in ((4,), (2, 2))
] + [(model, {}, search, (4,)) for model in ("wresnet50", "rnnlm") for search in ("data-parallel", "auto")]


def main() -> None:
    ran = subprocess.run([sys.executable, str(RUNNER), json.dumps(CASES)], capture_output=True, text=True)
    if ran.returncode:
        sys.exit(ran.stderr[-2000:])
    exact, errors = 0, []
    print(f"{'model':<10}{'search':<15}{'mesh':<8}{'communication':<16}{'predicted':>12}{'measured':>12}{'error':>9}")
    for (model, _, search, axes), row in zip(CASES, json.loads(ran.stdout.strip().splitlines()[-1]), strict=True):
        same = row["predicted"] == row["performed"]
        exact += same
        errors.append(row["peak"] / row["measured"] - 1)
        total = sum(size for _, size in row["performed"].values())
        shown = f"{total / 1e6:.2f} MB " + ("=" if same else "differs")
        mesh = "x".join(map(str, axes))
        sizes = f"{row['peak']:>12,}{row['measured']:>12,}"
        print(f"{model:<10}{search:<15}{mesh:<8}{shown:<16}{sizes}{100 * errors[-1]:>8.2f}%")
    print(f"communication exactly as predicted in {exact} of {len(CASES)} plans")
    print(
        f"memory: median |error| {100 * statistics.median(map(abs, errors)):.2f} %, "
        f"most under {100 * min(errors):+.2f} %, most over {100 * max(errors):+.2f} %"
    )


if __name__ == "__main__":
    main()
