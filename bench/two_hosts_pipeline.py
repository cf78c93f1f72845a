"""Two hosts at 1 Gbit/s and a GPT whose parameters outweigh its activations: a pipeline against DDP and fully_shard.

    python bench/two_hosts_pipeline.py [--repeats 9] [--seconds 60] [--write]

The hosts are those of :mod:`two_hosts` (network namespaces, one core each, a token bucket), calibrated the same way. The
plan is what the planner finds with two stages: cut, number of micro-batches and order of passes are its own. All engines
train in the same two processes, two steps each in turn: the second is timed, as a step of training follows another of its
own (the first finds its memory given back and the caches full of another engine; it is in the raw figures). Of the
pipeline, step, bubble and memory per rank are predicted and measured: the bubble is the share of the step in which a rank
waits for the other, memory what the allocator has handed out at the worst moment of a step, with parameters and optimizer
state.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests")]

import two_hosts  # noqa: E402

CASE = "gpt"
two_hosts.CASES[CASE] = ("gpt:layers=4,width=1024,heads=16,vocab=1000", 16, 16)
ENGINES = ("pipeline", "DDP", "fully_shard")
WRITTEN = HERE / "measured" / "two_hosts_pipeline.json"


def make_plan(folder: Path) -> dict[str, Any]:
    """The pipeline that the planner finds, and what it and the best plan on one mesh are predicted to take."""
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, Pipelining, plan_graph, plan_pipeline
    from shardwright.simulator import simulate_plan
    from shardwright.zoo.reference import resolve

    reference, batch, seq = two_hosts.CASES[CASE]
    built = resolve(reference, batch=batch, seq=seq, device="meta")
    graph = capture(built.model, built.args, built.kwargs)
    cluster = parse_cluster(str(folder / "cluster.toml"))
    options = Options(baselines=(), fewer_devices=False, time_limit=10.0)
    plan = plan_pipeline(graph, cluster, Pipelining(2), options)
    plan.save(folder / "pipeline.json")
    timeline = simulate_plan(plan, graph)
    predicted: dict[str, Any] = {"pipeline": timeline.seconds}
    for name, search in (("one mesh", "auto"), ("DDP", "data-parallel"), ("fully_shard", "fsdp")):
        found = plan_graph(graph, cluster, Options(search=search, baselines=(), fewer_devices=False, time_limit=10.0))
        predicted[name] = found.prediction.step_seconds
    about = {"microbatches": plan.microbatches, "order": str(plan.schedule), "cut": len(plan.stages[0].operators)}
    bubbles = [stage.bubble for stage in timeline.stages]
    return {"seconds": predicted, "bubbles": bubbles, "memory": timeline.memory, "plan": about}


def train(rank: int, folder: Path, repeats: int) -> None:
    """On one host: all engines, two steps each in turn."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from runtime.performed import peak_of
    from shardwright import Plan, parallelize
    from shardwright._torch_compat import local_of
    from shardwright.zoo.reference import resolve

    waited = _clocked_waits()
    engines = {}
    for name in ENGINES:
        if name == "pipeline":
            reference, batch, seq = two_hosts.CASES[CASE]
            built = resolve(reference, batch=batch, seq=seq, device="cpu")
            model = parallelize(built.model, Plan.load(folder / "pipeline.json"), built.args, built.kwargs)
            args = built.args
        elif name == "DDP":
            model, args = two_hosts.engine(name, CASE, folder)
        else:
            model, args = _fully_sharded()
        engines[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-5), args)
    taken: dict[str, list[float]] = {name: [] for name in ENGINES}
    cores: dict[str, list[float]] = {name: [] for name in ENGINES}
    idle: list[float] = []

    def step(name: str) -> tuple[float, float]:
        model, optimizer, args = engines[name]
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        began, core = time.perf_counter(), time.process_time()
        waited[0] = 0.0
        model(*args).backward()
        optimizer.step()
        mine, core = time.perf_counter() - began, time.process_time() - core
        dist.barrier()
        wall = time.perf_counter() - began
        if name == "pipeline":
            idle.append((waited[0] + wall - mine) / wall)
        return wall, core

    first: dict[str, list[float]] = {name: [] for name in ENGINES}
    for repeat in range(-5, repeats):  # our operators are traced after a few passes; one step warms the others up
        for name in ENGINES if repeat >= -1 else ENGINES[:1]:
            cold, _ = step(name)
            wall, core = step(name)
            if repeat >= 0:
                first[name].append(cold)
                taken[name].append(wall)
                cores[name].append(core)
    idle = idle[1::2][-repeats:]
    model, optimizer, _ = engines["pipeline"]
    optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step("pipeline")
    state = [local_of(v) for values in optimizer.state.values() for v in values.values() if v.dim()]
    held = sum(t.nbytes for t in [*(local_of(p) for p in model.parameters()), *model.buffers(), *state])
    found = {"taken": taken, "first": first, "cores": cores, "idle": idle, "memory": held + peak_of(profiler)}
    (folder / f"measured-{rank}.json").write_text(json.dumps(found))


def _fully_sharded() -> tuple[Any, tuple[Any, ...]]:
    """Block by block, and the rest, whose embedding and head share their weight, in one."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from shardwright.zoo.reference import resolve

    reference, batch, seq = two_hosts.CASES[CASE]
    built = resolve(reference, batch=batch, seq=seq, device="cpu")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in built.model.blocks:
        fully_shard(block, mesh=mesh)
    mine = tuple(x.chunk(dist.get_world_size())[dist.get_rank()] for x in built.args)
    return fully_shard(built.model, mesh=mesh), mine


def _clocked_waits() -> list[float]:
    """A clock of the seconds that a rank of a pipeline waits for others."""
    from shardwright.runtime import deferred_results, point_to_point

    total = [0.0]

    def clocked(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def wait(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*args)
            finally:
                total[0] += time.perf_counter() - began

        setattr(owner, name, wait)

    clocked(point_to_point.PointToPoint, "receive")
    clocked(point_to_point.PointToPoint, "finish")
    clocked(deferred_results.ResultParts, "whole")
    return total


def work(rank: int, given: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from emulated_hosts import ADDRESSES

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(two_hosts.PORT), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    if given.job == "calibrate":
        two_hosts.calibrate(rank, given.folder, given.seconds)
    else:
        train(rank, given.folder, given.repeats)
    dist.barrier()
    dist.destroy_process_group()


def summary(predicted: dict[str, Any], measured: list[dict[str, Any]]) -> dict[str, Any]:
    """What was asked: speed-ups, and the errors of step, bubble and memory."""
    steps = {name: statistics.median(times) for name, times in measured[0]["taken"].items()}
    said = predicted["seconds"]
    bubbles = [statistics.median(one["idle"]) for one in measured]
    return {
        "median_seconds": steps,
        "predicted_seconds": said,
        "step_error": said["pipeline"] / steps["pipeline"] - 1,
        "speed_up": {name: steps[name] / steps["pipeline"] for name in ENGINES[1:]},
        "median_bubbles": bubbles,
        "predicted_bubbles": predicted["bubbles"],
        "bubble_error_points": [100 * (a - b) for a, b in zip(predicted["bubbles"], bubbles, strict=True)],
        "memory": [one["memory"] for one in measured],
        "memory_error": [a / one["memory"] - 1 for a, one in zip(predicted["memory"], measured, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60.0, help="of calibrating kernels")
    parser.add_argument("--folder", type=Path, help="keep cluster file, plan and times here; what is there is reused")
    parser.add_argument("--write", action="store_true", help=f"write {WRITTEN.relative_to(HERE.parent)}")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        work(given.rank, given)
        return
    from emulated_hosts import hosts, run_on_hosts, why_not

    if reason := why_not():
        raise SystemExit(f"Cannot run here: {reason}.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)

        def on_both(job: str, seconds: float) -> None:
            command = [sys.executable, str(Path(__file__).resolve()), "--job", job, "--folder", str(folder.resolve())]
            command += ["--repeats", str(given.repeats), "--seconds", str(given.seconds)]
            with hosts("1gbit") as names:
                run_on_hosts(names, [[*command, "--rank", str(rank)] for rank in range(2)], seconds)

        loads = [os.getloadavg()[0]]
        if not (folder / "cluster.toml").exists():
            on_both("calibrate", 300.0 + 3 * given.seconds)
        if not (folder / "predicted.json").exists():
            (folder / "predicted.json").write_text(json.dumps(make_plan(folder)))
        predicted = json.loads((folder / "predicted.json").read_text())
        on_both("train", 300.0 + 30.0 * given.repeats)
        loads.append(os.getloadavg()[0])
        measured = [json.loads((folder / f"measured-{rank}.json").read_text()) for rank in range(2)]
        found = {
            "model": two_hosts.CASES[CASE],
            "load": loads,
            **summary(predicted, measured),
            "plan": predicted["plan"],
        }
        print(json.dumps(found, indent=1))
        if given.write:
            WRITTEN.write_text(json.dumps({**found, "raw": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
