"""A link at a tenth of its rate: two emulated hosts, one core each, and an assistant that goes over to another plan.

    python bench/slow_link.py [--rate 1gbit] [--slow 100mbit]      # needs root; one JSON object

A GPT is trained by a tensor-parallel plan, whose activations cross the cable in every layer. After some steps `tc` changes
the cable's rate. Once with an assistant and once with one that only watches: the median of the last steps of both, the
event, and the losses of both, which must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "src"))

MODEL = "gpt:layers=2,width=128,heads=4,vocab=256,batch=32,seq=128"
PORT = 29573
BEFORE, AFTER = 24, 30
"""Steps at the full rate, and at the slow one."""


def cluster(rate: float) -> Any:
    """Two machines like this one, joined by a cable of so many bytes a second."""
    from dataclasses import replace

    from shardwright.cluster import parse_cluster
    from shardwright.cluster.hardware import Cluster, Link

    node = replace(parse_cluster("local:2").nodes[0], devices=1)
    return Cluster("two emulated hosts", (node, node), Link("cable", 3e-4, rate))


def work(rank: int, folder: Path, mode: str) -> None:
    """On one host: train, say when the cable may be slowed, go on."""
    import torch
    import torch.distributed as dist

    from emulated_hosts import ADDRESSES
    from shardwright import Plan, assist, parallelize
    from shardwright.zoo.reference import resolve

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(PORT), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    built = resolve(MODEL, device="cpu")
    model = parallelize(built.model, Plan.load(folder / "plan.json"), built.args, built.kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assistant = assist(model, optimizer, mode=mode)  # type: ignore[arg-type]
    seconds, losses = [], []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            dist.barrier()
            if rank == 0:
                (folder / "slow-down").touch()
                while not (folder / "slowed").exists():
                    time.sleep(0.05)
            dist.barrier()
        began = time.perf_counter()
        loss = model(*built.args, **built.kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
    assistant.leave()
    if rank == 0:
        told = [event.as_dict() | {"text": str(event)} for event in assistant.events]
        axes = [list(axis) for axis in model.program.strategy.axes]
        (folder / "answer.json").write_text(
            json.dumps({"seconds": seconds, "losses": losses, "events": told, "axes": axes, "load": os.getloadavg()[0]})
        )
    dist.barrier()
    dist.destroy_process_group()


def slowed(folder: Path, mode: str, rate: str, slow: str) -> dict[str, Any]:
    """One job, whose cable is slowed when it says so."""
    import threading

    from emulated_hosts import CABLE, hosts, run_on_hosts

    for name in ("slow-down", "slowed", "answer.json"):
        (folder / name).unlink(missing_ok=True)
    with hosts(rate) as names:

        def slow_down() -> None:
            while not (folder / "slow-down").exists():
                time.sleep(0.05)
            for name in names:
                limit = ["tbf", "rate", slow, "burst", "128kb", "latency", "100ms"]
                change = ["tc", "qdisc", "change", "dev", CABLE, "root", *limit]
                subprocess.run(["ip", "netns", "exec", name, *change], check=True)
            (folder / "slowed").touch()

        threading.Thread(target=slow_down, daemon=True).start()
        command = [sys.executable, str(HERE / "slow_link.py"), "--folder", str(folder), "--mode", mode]
        run_on_hosts(names, [[*command, "--rank", str(rank)] for rank in range(2)], 280.0)
    return json.loads((folder / "answer.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--slow", default="100mbit")
    parser.add_argument("--search", default="megatron", help="the plan that the job starts with")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.mode:
        work(given.rank, given.folder, given.mode)
        return
    from emulated_hosts import why_not
    from shardwright import plan
    from shardwright.zoo.reference import resolve

    if reason := why_not():
        raise SystemExit(f"Cannot run here: {reason}.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        built = resolve(MODEL, device="meta")
        found = plan(
            built.model,
            built.args,
            built.kwargs,
            cluster=cluster(125e6),
            search=given.search,
            baselines=(),
            fewer_devices=False,
        )
        found.save(folder / "plan.json")
        answers = {mode: slowed(folder, mode, given.rate, given.slow) for mode in ("act", "watch")}
    last = {mode: statistics.median(answer["seconds"][-8:]) for mode, answer in answers.items()}
    before = statistics.median(answers["watch"]["seconds"][10:BEFORE])
    apart = max(abs(a - b) for a, b in zip(*(answer["losses"] for answer in answers.values()), strict=True))
    summary = {
        "before": before,
        "staying": last["watch"],
        "changed": last["act"],
        "times faster": last["watch"] / last["act"],
    }
    about = {
        "model": MODEL,
        "rates": [given.rate, given.slow],
        "losses apart": apart,
        "predicted": found.prediction.step_seconds,
    }
    print(json.dumps(summary | about | answers), flush=True)


if __name__ == "__main__":
    main()
