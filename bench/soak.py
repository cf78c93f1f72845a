"""Two processes train, save, resume, evaluate and plan again for as long as they are told: memory flat, nothing leaked.

``python -m bench.soak [MINUTES] [MODEL]`` (60, gpt:small). One cycle: plan with another strategy, parallelize a fresh model,
train, save a checkpoint, resume from it, evaluate. After every cycle each rank notes its resident memory, open files and
sockets, threads and children. What a cycle adds is the slope of a line through the second half of the run; it must be below
20 kB of memory, and nothing else may grow at all. Every twentieth cycle rank 0 says on the standard error where it is.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STRATEGIES = ("fsdp", "data-parallel", "megatron", "auto")
ALLOWED_BYTES = 20_000.0


def _counts() -> dict[str, float]:
    """What this process holds just now."""
    kinds = [
        os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")
    ]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "memory (bytes)": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "open files": sum(not kind.startswith("socket") for kind in kinds),
        "sockets": sum(kind.startswith("socket") for kind in kinds),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len([child for child in children if "resource_tracker" not in _command(child)]),  # Python's own
    }


def _command(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:  # gone meanwhile
        return "resource_tracker"


def cycles(minutes: float, folder: str, reference: str) -> list[dict[str, float]]:
    """One rank's cycles until the time is up; every rank ends with the same number."""
    import torch
    import torch.distributed as dist

    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph
    from shardwright.runtime import parallelize
    from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint
    from shardwright.zoo.reference import resolve

    ends, noted = time.monotonic() + 60 * minutes, []
    while True:
        go_on = torch.tensor([float(time.monotonic() < ends)])
        dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
        if not go_on.item():
            return noted
        built = resolve(reference, device="cpu")
        graph = capture(built.model, built.args, built.kwargs)
        options = Options(search=STRATEGIES[len(noted) % len(STRATEGIES)], baselines=(), fewer_devices=False)
        chosen = [plan_graph(graph, parse_cluster("local:2"), options) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(chosen)
        model = parallelize(built.model, chosen[0], built.args, built.kwargs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            model(*built.args, **built.kwargs).backward()
            optimizer.step()
        save_checkpoint(folder, len(noted) + 1, model, optimizer)
        assert load_checkpoint(folder, model, optimizer) is not None
        with torch.no_grad():
            assert torch.isfinite(model(*built.args, **built.kwargs))
        del model, optimizer, graph, built, chosen
        gc.collect()
        noted.append(_counts())
        if dist.get_rank() == 0 and len(noted) % 20 == 0:
            print(f"cycle {len(noted)}: {noted[-1]['memory (bytes)'] / 1e6:.1f} MB", file=sys.stderr, flush=True)


def main() -> None:
    from shardwright.runtime.launch import run_locally

    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    reference = sys.argv[2] if len(sys.argv) > 2 else "gpt:small"
    before = _counts()
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_locally(cycles, 2, minutes, folder, reference, seconds=60 * minutes + 900)
    after, wrong = _counts(), 0
    print(f"{len(ranks[0])} cycles of planning, 5 steps, saving, resuming and evaluating in {minutes:g} minutes.\n")
    print("| rank | what | after the first cycle | in the middle | at the end | added per cycle, second half |")
    print("|---:|---|---:|---:|---:|---:|")
    for rank, noted in enumerate(ranks):
        for what in noted[0]:
            values = np.array([one[what] for one in noted])
            half = values[len(values) // 2 :]
            slope = float(np.polyfit(np.arange(len(half)), half, 1)[0]) if len(half) > 1 else 0.0
            limit = ALLOWED_BYTES if "memory" in what else 0.01
            wrong += slope > limit
            print(
                f"| {rank} | {what} | {values[0]:.0f} | {values[len(values) // 2]:.0f} | {values[-1]:.0f} | {slope:.3g} |"
            )
    left = {what: after[what] - before[what] for what in ("sockets", "children")}
    print(f"\nLeft behind in the process that started them: {left}.")
    sys.exit(1 if wrong or any(value > 0 for value in left.values()) else 0)


if __name__ == "__main__":
    main()
