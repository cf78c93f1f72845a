"""What was priced against what is performed, plan by plan: instructions, communication, memory.

Every plan is run for two steps. Instructions are compared one by one, in order, with their bytes, on every rank;
communication per kind of collective and mesh axis, in tensors and bytes; memory (fake collectives only) with what PyTorch's
CPU allocator reports.

    python bench/simulator_plans.py                    # one rank of four, PyTorch's fake process group
    python bench/simulator_plans.py --processes 4      # every rank, real processes and gloo; or 2
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # which has a folder bench too

from runtime.performed import case, with_a_fake_group

WIDER = {"width": 128, "seq": 64, "vocab": 512, "batch": 8}
SEARCHES = ("data-parallel", "fsdp", "zero-2", "megatron", "megatron-sp", "auto")


def cases(processes: int) -> list[Any]:
    """52 plans of four ranks, 28 of two."""
    meshes = [(4,), (2, 2)] if processes == 4 else [(processes,)]
    words = [(m, WIDER, s, axes) for m in ("gpt", "llama", "bert", "moe") for s in SEARCHES for axes in meshes]
    others = [(m, {}, s, (processes,)) for m in ("wresnet50", "rnnlm") for s in ("data-parallel", "auto")]
    return words + others


def performed(given: list[Any]) -> list[dict[str, Any]]:
    """On one of several real processes."""
    rows = []
    for name, sizes, search, axes in given:
        row = case(name, sizes, search, axes, measured=False)
        rows.append({"instructions": row["instructions"], "communication": row["predicted"] == row["performed"]})
    return rows


def real(processes: int) -> None:
    from shardwright.runtime.launch import run_locally

    given = cases(processes)
    every = run_locally(performed, processes, given, seconds=6000)
    print(f"{'model':<10}{'search':<15}{'mesh':<8}{'instructions':<26}communication")
    good = 0
    for (model, _, search, axes), rows in zip(given, zip(*every, strict=True), strict=True):
        same = [sum(row[what] for row in rows) for what in ("instructions", "communication")]
        good += same == [processes, processes]
        mesh = "x".join(map(str, axes))
        print(f"{model:<10}{search:<15}{mesh:<8}as priced on {same[0]} of {processes} ranks  {same[1]} of {processes}")
    print(f"performed as priced on every rank: {good} of {len(given)} plans, {processes} processes")


def fake() -> None:
    given = cases(4)
    exact, errors = 0, []
    print(f"{'model':<10}{'search':<15}{'mesh':<8}{'communication':<16}{'predicted':>12}{'measured':>12}{'error':>9}")
    for (model, _, search, axes), row in zip(given, with_a_fake_group(given), strict=True):
        same = row["predicted"] == row["performed"] and row["instructions"]
        exact += same
        errors.append(row["peak"] / row["measured"] - 1)
        total = sum(size for _, size in row["performed"].values())
        shown = f"{total / 1e6:.2f} MB " + ("=" if same else "differs")
        mesh = "x".join(map(str, axes))
        sizes = f"{row['peak']:>12,}{row['measured']:>12,}"
        print(f"{model:<10}{search:<15}{mesh:<8}{shown:<16}{sizes}{100 * errors[-1]:>8.2f}%")
    print(f"instructions and communication exactly as priced in {exact} of {len(given)} plans")
    print(
        f"memory: median |error| {100 * statistics.median(map(abs, errors)):.2f} %, "
        f"most under {100 * min(errors):+.2f} %, most over {100 * max(errors):+.2f} %"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, choices=(2, 4))
    wanted = parser.parse_args().processes
    real(wanted) if wanted else fake()
