"""Two hosts at 1 Gbit/s: the found plan against DDP and fully_shard, measured and predicted, on AlexNet and RNNLM.

    python -m bench two_hosts            # or: python bench/two_hosts.py [--repeats 5] [--seconds 90] [--write]

The hosts are emulated (:mod:`emulated_hosts`; needs root), each with one core and one thread. They are calibrated first,
kernels and gloo's collectives through the limited cable, and written to a cluster file; plans are made for that file
through the public interface. Then all engines train in the same processes, one step each in turn, and the medians are
compared. DDP's prediction is the simulation of our data-parallel strategy. On a CPU, where there are no streams,
``fully_shard`` waits for every collective, so its prediction is our fsdp strategy with one event after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
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

CASES = {"alexnet": ("alexnet", 32, None), "rnnlm": ("rnnlm:width=512,vocab=50000", 32, 16)}
ENGINES = {"found": "auto", "data": "data-parallel", "fsdp": "fsdp", "DDP": "data-parallel", "fully_shard": "fsdp"}
"""Who trains, and whose simulation predicts it; the first three are plans of ours."""
PORT = 29571
PHASES = ("forward", "backward", "update")


def calibrate(rank: int, folder: Path, seconds: float) -> None:
    """On one host: measure kernels and collectives; the first host writes the cluster file."""
    from shardwright.cluster.calibrate import run

    found = run("hosts", seconds)
    if rank == 0:
        (folder / "cluster.toml").write_text(found.text)
        (folder / "raw.json").write_text(json.dumps(found.raw))


def make_plans(folder: Path, case: str) -> dict[str, dict[str, Any]]:
    """Plan for the calibrated cluster; per plan the predicted seconds, in all and per phase."""
    from shardwright import plan
    from shardwright.frontend import capture
    from shardwright.simulator import simulate
    from shardwright.zoo.reference import resolve

    reference, batch, seq = CASES[case]
    built = resolve(reference, batch=batch, seq=seq, device="meta")
    graph = capture(built.model, built.args, built.kwargs)
    predicted = {}
    for search in dict.fromkeys(ENGINES.values()):
        cluster = str(folder / "cluster.toml")
        found = plan(
            built.model, built.args, built.kwargs, cluster=cluster, search=search, fewer_devices=False, time_limit=20.0
        )
        found.save(folder / f"{case}-{search}.json")
        timeline = simulate(graph, found.stages[0].strategy, found.meshes[0])
        ends, compute = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        for event, end in zip(timeline.ranks[0].events, timeline.ranks[0].ends, strict=True):
            ends[event.phase] = max(ends[event.phase], end)
            compute[event.phase] += 0.0 if event.collective else event.seconds
        predicted[search] = {
            "seconds": timeline.seconds,
            "waiting": sum(event.seconds + event.host for event in timeline.ranks[0].events),
            "phases": [ends["forward"], ends["backward"] - ends["forward"], timeline.seconds - ends["backward"]],
            "compute": list(compute.values()),
            "bytes": timeline.communication_bytes,
            "notes": found.notes,
        }
    return predicted


def engine(name: str, case: str, folder: Path) -> tuple[Any, tuple[Any, ...]]:
    """A model split by one engine, and what one rank feeds it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from shardwright import Plan, parallelize
    from shardwright.zoo.reference import resolve

    reference, batch, seq = CASES[case]
    built = resolve(reference, batch=batch, seq=seq, device="cpu")
    if name in ("found", "data", "fsdp"):
        plan = Plan.load(folder / f"{case}-{ENGINES[name]}.json")
        return parallelize(built.model, plan, built.args, built.kwargs), built.args
    mine = tuple(x.chunk(dist.get_world_size())[dist.get_rank()] for x in built.args)
    if name == "DDP":
        return DistributedDataParallel(built.model, gradient_as_bucket_view=True), mine
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    large = [m for m in built.model.modules() if not list(m.children()) and list(m.parameters())]
    for module in large:
        fully_shard(module, mesh=mesh)
    return fully_shard(built.model, mesh=mesh), mine


def train(rank: int, folder: Path, case: str, repeats: int, names: list[str]) -> None:
    """On one host: all engines, one step each in turn; the first host writes the seconds of every phase."""
    import torch
    import torch.distributed as dist

    engines = {}
    for name in names:
        model, args = engine(name, case, folder)
        engines[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-5), args)
    taken: dict[str, list[list[float]]] = {name: [] for name in names}
    cores: dict[str, list[list[float]]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for repeat in range(-1, repeats):
        for name in names if repeat % 2 else names[::-1]:
            model, optimizer, args = engines[name]
            optimizer.zero_grad(set_to_none=True)
            dist.barrier()
            marks = [_clocks()]
            loss = model(*args)
            marks.append(_clocks())
            loss.backward()
            marks.append(_clocks())
            optimizer.step()
            dist.barrier()
            marks.append(_clocks())
            if repeat >= 0:
                wall, busy = ([b[i] - a[i] for a, b in itertools.pairwise(marks)] for i in range(2))
                taken[name].append(wall)
                cores[name].append(busy)
            losses[name] = float(_mean_loss(loss.detach()) if name not in ("found", "data", "fsdp") else loss)
    if rank == 0:
        (folder / f"{case}-taken.json").write_text(json.dumps({"taken": taken, "cores": cores, "losses": losses}))


def _clocks() -> tuple[float, float]:
    """Wall seconds, and those in which this process had its core: other programs do not change the latter."""
    return time.perf_counter(), time.process_time()


def _mean_loss(loss: Any) -> Any:
    """The native engines see the loss of their part of the batch."""
    import torch.distributed as dist

    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def work(rank: int, folder: Path, job: str, given: argparse.Namespace) -> None:
    """What a process on a host does: join the other one, on one core, and calibrate or train."""
    import torch
    import torch.distributed as dist

    from emulated_hosts import ADDRESSES

    with contextlib.suppress(OSError, AttributeError):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # Adam's averages of vanishing gradients would be slow by chance
    os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(PORT), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    if job == "calibrate":
        calibrate(rank, folder, given.seconds)
    else:
        train(rank, folder, job, given.repeats, given.engines.split(","))
    dist.barrier()
    dist.destroy_process_group()


def table(case: str, predicted: dict[str, Any], measured: dict[str, Any], worst: dict[str, float]) -> list[str]:
    """The comparison of one model in Markdown; ``worst`` gathers the largest errors."""
    taken = measured["taken"]
    seconds = {name: statistics.median(sum(step) for step in steps) for name, steps in taken.items()}
    reference, batch, seq = CASES[case]
    length = "" if seq is None else f" × {seq} tokens"
    lines = [
        f"**{reference}, batch {batch}{length}**",
        "",
        "| engine | step, measured (fastest) | predicted | error | speed-up of found, measured | predicted | error |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]

    def note(what: str, error: float) -> None:
        worst[what] = max(worst.get(what, 0.0), abs(error))

    for name, own in seconds.items():
        guess = predicted[ENGINES[name]]["waiting" if name == "fully_shard" else "seconds"]
        note("step time", guess / own - 1)
        least = min(map(sum, taken[name]))
        row = f"| {name} | {own:.3f} s ({least:.3f}) | {guess:.3f} s | {100 * (guess / own - 1):+.0f} % |"
        if name != "found" and "found" in seconds:
            real, said = own / seconds["found"], guess / predicted["auto"]["seconds"]
            if name in ("DDP", "fully_shard"):
                note("speed-up", said / real - 1)
            row += f" {real:.2f} | {said:.2f} | {100 * (said / real - 1):+.0f} % |"
        lines.append(row if name != "found" else row + " | | |")
    losses = measured["losses"]
    apart = max(losses.values()) - min(losses.values())
    lines += ["", f"Losses after {1 + len(next(iter(taken.values())))} steps agree within {apart:.1e}."]
    lines += ["", "| engine | forward, backward, update: wall | predicted | core | predicted compute | MB |"]
    lines += ["|---|---|---|---|---|--:|"]
    for name, steps in taken.items():
        guess = predicted[ENGINES[name]]
        columns = (_medians(steps), guess["phases"], _medians(measured["cores"][name]), guess["compute"])
        shown = " | ".join(", ".join(f"{value:.3f}" for value in column) for column in columns)
        lines.append(f"| {name} | {shown} | {guess['bytes'] / 1e6:.1f} |")
    return lines


def _medians(steps: list[list[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*steps, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=90.0, help="of calibrating kernels")
    parser.add_argument("--folder", type=Path, help="keep cluster file, plans and times here; a cluster file is reused")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/two_hosts.md")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        work(given.rank, given.folder, given.job, given)
        return
    from emulated_hosts import HostError, hosts, run_on_hosts, why_not

    if reason := why_not():
        raise SystemExit(f"Cannot run here: {reason}.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)

        def on_both(job: str, seconds: float) -> None:
            command = [sys.executable, str(HERE / "two_hosts.py"), "--job", job, "--folder", str(folder.resolve())]
            command += ["--repeats", str(given.repeats), "--seconds", str(given.seconds), "--engines", given.engines]
            with hosts("1gbit") as names:
                run_on_hosts(names, [[*command, "--rank", str(rank)] for rank in range(2)], seconds)

        lines: list[str] = []
        worst: dict[str, float] = {}

        def show(*more: str) -> None:
            print("\n".join(more), flush=True)
            lines.extend(more)

        load = os.getloadavg()[0]
        try:
            if not (folder / "cluster.toml").exists():
                on_both("calibrate", 300.0 + 3 * given.seconds)
            show(_describe(folder))
            for case in given.cases.split(","):
                predicted = make_plans(folder, case)
                on_both(case, 300.0 + 120.0 * given.repeats)
                measured = json.loads((folder / f"{case}-taken.json").read_text())
                show("", *table(case, predicted, measured, worst))
        except HostError as error:
            raise SystemExit(f"A host failed: {error}") from None
        bars = ", ".join(f"{what} {100 * error:.0f} %" for what, error in worst.items())
        show("", f"Worst error of prediction: {bars}. Load average before {load:.1f}, after {os.getloadavg()[0]:.1f}.")
        if given.write:
            _write(lines)


def _write(lines: list[str]) -> None:
    """Keep the results as a page of the documentation, with what is to be said about them."""
    root = HERE.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=root).stdout
    head = f"`python bench/two_hosts.py --write`, {datetime.date.today()}, commit {commit.strip()}, 2-core CPU."
    notes = (HERE / "two_hosts_notes.md").read_text().strip()
    text = "\n".join(["# Two hosts at 1 Gbit/s: results", "", head, "", *lines, "", notes, ""])
    (root / "docs" / "benchmarks" / "two_hosts.md").write_text(text)


def _describe(folder: Path) -> str:
    from shardwright.cluster import parse_cluster

    cluster = parse_cluster(str(folder / "cluster.toml"))
    device, link = cluster.device, cluster.network
    fits = ", ".join(f"{kind} {1e3 * latency:.2f} ms + {rate / 1e6:.0f} MB/s" for kind, latency, rate in link.fits)
    return (
        f"Each host: {device.peak('float32') / 1e9:.0f} Gflop/s, memory {device.bandwidth / 1e9:.1f} GB/s. Cable: {fits}; "
        f"a collective takes {100 * link.processor_share:.0f} % of the core."
    )


if __name__ == "__main__":
    main()
