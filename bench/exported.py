"""Exported code beside our runtime: the same plans, the numbers of one process, and seconds a step.

    python bench/exported.py -o bench/measured/exchange/exported.txt     # four gloo processes, ten minutes
    python bench/exported.py --only "fsdp" --rounds 3

Every plan is exported with ``shardwright.export(plan, to="pytorch")``. *Numbers*: its code trains three steps on four
processes in which importing shardwright fails, in float64; losses, gradients and updated parameters are compared with one
plain process. *Seconds*: in four other processes the plan trains by our runtime and by the exported code, turn by turn, in
float32 on a wider model; medians over all steps of rank 0, and of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from shardwright.cluster import parse_cluster
from shardwright.exchange import Configuration
from shardwright.exchange.exporting import Export, export
from shardwright.exchange.planning import plan_like
from shardwright.frontend import capture
from shardwright.graph import Graph

HERE = Path(__file__).resolve().parent / "exported_code"
MODELS, JOB = HERE / "models.py", HERE / "job.py"
RANKS = 4
WIDER = {"MODEL_WIDTH": "256", "MODEL_LENGTH": "64"}
WARM, STEPS = 4, 4
"""Steps of each before anything is timed, and steps of each in a round."""


def on(model: str, **decisions: Any) -> tuple[str, Configuration]:
    return model, Configuration("plan", **decisions)


PLANS = {
    "ddp": on("tied", replicate=4),
    "ddp, accumulated": on("apart", replicate=4, microbatches=2),
    "fsdp": on("tied", shard=4),
    "fsdp, kept and recomputed": on("apart", shard=4, reshard=False, recompute="blocks", microbatches=2),
    "hybrid shard": on("tied", replicate=2, shard=2),
    "tensor": on("apart", tensor=4),
    "tensor and sequence": on("apart", tensor=4, sequence=True),
    "2-D": on("tied", shard=2, tensor=2),
    "2-D with sequence": on("apart", shard=2, tensor=2, sequence=True, recompute="blocks"),
    "replicas of tensor": on("apart", replicate=2, tensor=2, sequence=True),
    "1f1b and fsdp": on("apart", pipeline=2, shard=2, microbatches=4),
    "1f1b and tensor": on("apart", pipeline=2, tensor=2, microbatches=4),
    "gpipe, tied over stages": on("tied", pipeline=4, schedule="gpipe", microbatches=4),
    "transformers' llama in 2-D": on("llama", shard=2, tensor=2, sequence=True),
    "transformers' llama, 1f1b and fsdp": on("llama", pipeline=2, shard=2, microbatches=4),
    "transformers' gpt2, tensor": on("gpt2", replicate=2, tensor=2),
    "transformers' gpt2, 1f1b": on("gpt2", pipeline=4, microbatches=4),
}
"""By name: a function of ``exported_code/models.py``, and what the plan is told."""


def built(model: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    found, args, *more = runpy.run_path(str(MODELS))[model]()
    return found, args, dict(*more)


@cache
def graph(model: str) -> Graph:
    return capture(*built(model))


@cache
def exported(name: str) -> Export:
    model, c = PLANS[name]
    plan = plan_like(graph(model), parse_cluster(f"local:{RANKS}"), c).plan
    return export(plan, to="pytorch", graph=graph(model), price=False)


@cache
def of_one_process(model: str, steps: int) -> dict[str, Any]:
    """Losses, the first gradients and the updated parameters of plain training in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module, args, kwargs = built(model)
    finally:
        torch.set_default_dtype(before)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses, gradients = [], {}
    for number in range(steps):
        optimizer.zero_grad()
        loss = module(*args, **kwargs)
        loss = getattr(loss, "loss", loss)
        loss.backward()
        losses.append(float(loss.detach()))
        if number == 0:
            gradients = {n: p.grad.clone() for n, p in module.named_parameters(remove_duplicate=False)}
        optimizer.step()
    updated = {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)}
    return {"losses": losses, "gradients": gradients, "updated": updated}


def without_shardwright(folder: Path) -> dict[str, str]:
    """An environment in which importing shardwright fails, however it was installed."""
    blocked = folder / "blocked"
    blocked.mkdir(exist_ok=True)
    (blocked / "sitecustomize.py").write_text(
        "import sys\n\n\nclass Blocked:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'shardwright':\n            raise ImportError('blocked')\n\n\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PYTHONPATH": str(blocked), "OMP_NUM_THREADS": "1"}


def saved(names: tuple[str, ...], folder: Path) -> None:
    """The exported programs of these plans, and the list of jobs, in a folder."""
    jobs = []
    for number, name in enumerate(names):
        program = folder / f"exported_{number}.py"
        exported(name).save(program)
        jobs.append({"name": str(number), "program": str(program), "model": f"{MODELS}:{PLANS[name][0]}"})
    (folder / "jobs.json").write_text(json.dumps(jobs))


def run_ranks(command: list[str], environment: dict[str, str], folder: Path, seconds: float) -> None:
    """``command RANK RANKS FOLDER`` on every rank; all are ended when one outlasts its time."""
    ranks = []
    for rank in range(RANKS):
        with (folder / f"said_{rank}.txt").open("w") as said:
            words = [sys.executable, *command, str(rank), str(RANKS), str(folder)]
            ranks.append(subprocess.Popen(words, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT))
    try:
        until = time.monotonic() + seconds
        for rank in ranks:
            rank.wait(max(until - time.monotonic(), 1))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = "\n".join((folder / f"said_{rank}.txt").read_text() for rank in range(RANKS))
    assert all(rank.returncode == 0 for rank in ranks), said


def run_blocked(names: tuple[str, ...], folder: Path, seconds: float) -> None:
    """The exported programs where shardwright cannot be imported."""
    saved(names, folder)
    run_ranks([str(JOB)], without_shardwright(folder), folder, seconds)


def differences(name: str, number: int, folder: Path) -> dict[str, float]:
    """The largest differences from one process over all ranks: losses relatively, gradients and parameters absolutely;
    ``missing``: how many parameters had no gradient on any rank."""
    found = [torch.load(folder / f"{number}.{rank}.pt") for rank in range(RANKS)]
    one = of_one_process(PLANS[name][0], len(found[0]["losses"]))
    worst = dict.fromkeys(("losses", "gradients", "updated"), 0.0)
    for rank in found:
        pairs = zip(rank["losses"], one["losses"], strict=True)
        worst["losses"] = max(worst["losses"], *(abs(a - b) / abs(b) for a, b in pairs))
        for what in ("gradients", "updated"):
            for path, tensor in rank[what].items():
                worst[what] = max(worst[what], float((tensor - one[what][path]).abs().max()))
    values = {id(p): n for n, p in reversed(list(built(PLANS[name][0])[0].named_parameters(remove_duplicate=False)))}
    held = {path for rank in found for path in rank["gradients"]}
    return worst | {"missing": float(len(set(values.values()) - held))}


def forward_and_backward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    loss = model(*args, **kwargs)
    getattr(loss, "loss", loss).backward()


def timed(rank: int, ranks: int, folder: Path, rounds: int) -> None:
    """One rank of the second part: our runtime and the exported code turn by turn, for every job."""
    import torch.distributed as dist

    import shardwright

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    rows = []
    for job in json.loads((folder / "jobs.json").read_text()):
        model = job["model"].rpartition(":")[2]
        spec = importlib.util.spec_from_file_location("exported_program", job["program"])
        assert spec is not None and spec.loader is not None
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        module, args, kwargs = built(model)
        ours = shardwright.parallelize(module, shardwright.Plan.load(job["plan"]), args, kwargs)
        mesh = program.device_mesh()
        theirs = program.parallelize(built(model)[0], mesh)
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3, foreach=False) for one in (ours, theirs)]

        own = partial(forward_and_backward, ours, args, kwargs)
        other = partial(program.step, theirs, mesh, *args, **kwargs)
        seconds: list[list[list[float]]] = [[], []]
        for number in range(rounds + 1):
            for place, step in enumerate((own, other)):
                spent = []
                for _ in range(STEPS if number else WARM):
                    dist.barrier()
                    start = time.perf_counter()
                    optimizers[place].zero_grad()
                    step()
                    optimizers[place].step()
                    spent.append(time.perf_counter() - start)
                seconds[place] += [spent] if number else []
        rows.append({"plan": job["plan_name"], "ours": seconds[0], "exported": seconds[1]})
        if rank == 0:
            (folder / "seconds.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure(names: tuple[str, ...], rounds: int) -> list[dict[str, Any]]:
    """Numbers and seconds of every plan."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_blocked(names, folder, 1200)
        for number, plan in enumerate(names):
            rows.append(
                {"plan": plan, "lines": len(exported(plan).text.splitlines())} | differences(plan, number, folder)
            )
    os.environ.update(WIDER)
    for known in (graph, exported):
        known.cache_clear()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved(names, folder)
        jobs = json.loads((folder / "jobs.json").read_text())
        for number, plan in enumerate(names):
            exported(plan).plan.save(folder / f"plan_{number}.json")
            jobs[number] |= {"plan": str(folder / f"plan_{number}.json"), "plan_name": plan}
        (folder / "jobs.json").write_text(json.dumps(jobs))
        run_ranks([__file__, "--timed", str(rounds)], {**os.environ, "OMP_NUM_THREADS": "1"}, folder, 3000)
        for row, seconds in zip(rows, json.loads((folder / "seconds.json").read_text()), strict=True):
            row |= seconds
    return rows


def line(row: dict[str, Any]) -> str:
    numbers = f"{row['losses']:.1e} {row['gradients']:.1e} {row['updated']:.1e} {row['missing']:.0f}"
    ours, theirs = (statistics.median(s for spent in row[who] for s in spent) for who in ("ours", "exported"))
    pairs = zip(row["ours"], row["exported"], strict=True)
    ratio = statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)
    return f"{row['plan']:36} {row['lines']:4} {numbers}   {1e3 * ours:7.1f} {1e3 * theirs:7.1f} {ratio:6.2f}"


HEAD = f"{'plan':36} {'line':>4} {'loss':7} {'grad':7} {'update':7} missing   ours ms  exp. ms  ours/exported"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="this plan; may be said several times")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "-o", "--output", type=Path, help="write what is printed here, and all seconds beside it as JSON"
    )
    parser.add_argument("--timed", nargs=4, metavar=("ROUNDS", "RANK", "RANKS", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.timed:
        rounds, rank, ranks, folder = asked.timed
        timed(int(rank), int(ranks), Path(folder), int(rounds))
        return
    about = f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    about += f", load {os.getloadavg()[0]:.1f} at the start; {RANKS} gloo processes, wider model {WIDER}"
    print(f"{about}\n{HEAD}", flush=True)
    rows = measure(tuple(asked.only or PLANS), asked.rounds)
    print("\n".join(map(line, rows)))
    if asked.output:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text("\n".join([about, HEAD, *map(line, rows), ""]))
        asked.output.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}))


if __name__ == "__main__":
    main()
