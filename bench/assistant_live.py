"""The assistant on real processes: two gloo ranks, one core each, and a real competing process on the core of one of them.

A GPT is trained with AdamW, split by ``--search``: data-parallel and fsdp (rows of the batch move), megatron (heads, with
their parameters), or a pipeline of two stages (blocks). ``slowed``: per slowdown, competitors on the core of rank 1
(stopped and continued by signals) begin and end while the assistant is there; what it had chosen ten steps after the
beginning is then compared, in rounds of blocks right after each other, with equal shares and with an undisturbed core.
``possible`` is work over summed speeds: two over (1/undisturbed + 1/disturbed), the latter while something keeps the core of
rank 0 busy whenever that waits: cores of a virtual machine may be threads of one real core, and a slow rank is faster as
long as the other one has nothing to do, which ends when the work is shared out well. ``shares``: two cores, one half busy;
shares by speed against equal ones, in turns. ``overhead``: with and without the assistant in turns, undisturbed.
``healthy``: moves in an undisturbed run. ``broken``: rank 1 is stopped and continued so that it is about 20 times slower,
is left out, and is taken back when that ends.

With ``REALTIME=1`` root runs ranks and competitors before everybody else (round robin among themselves; a short
``sched_rr_timeslice_ms`` makes them fair within a step). The machine's load is part of the output, one JSON object per
line.

    REALTIME=1 python bench/assistant_live.py shares slowed overhead --repeats 3 > bench/measured/assistant_live.jsonl
    REALTIME=1 python bench/assistant_live.py slowed --search megatron --repeats 3 >> bench/measured/assistant_live.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths, span_of
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan, Stage
from shardwright.program.microbatches import microbatches
from shardwright.program.stages import stage_graphs
from shardwright.runtime import parallelize
from shardwright.runtime.assistant import assist
from shardwright.runtime.launch import run_locally
from shardwright.schedules import known_schedule
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.zoo.reference import resolve

MODELS = {
    "data-parallel": "gpt:layers=2,width=128,heads=4,vocab=256,batch=32,seq=256",
    "fsdp": "gpt:layers=2,width=128,heads=4,vocab=256,batch=32,seq=256",
    "megatron": "gpt:layers=1,width=1024,heads=16,vocab=256,batch=2,seq=256",
    "pipeline": "gpt:layers=16,width=96,heads=4,vocab=256,batch=16,seq=128",
}
"""By the plan that splits it: rows of the batch, heads and blocks are what can be moved."""
MICROBATCHES = 8
SLOWDOWNS = {1.5: (1 / 3,), 2.0: (1.0,), 4.0: (1.0, 1.0, 1.0)}
"""Competitors on the core, each with the part of its time that it wants to compute."""
BUSY = """
import os, sys, time
own, part, period = os.getppid(), float(sys.argv[1]), 0.03
while os.getppid() == own:  # it ends with whoever started it
    began, end = time.monotonic(), time.process_time() + part * period
    while time.process_time() < end:
        pass
    if part < 1:
        time.sleep(max(0.0, began + period - time.monotonic()))
"""
FILLER = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # only where nobody else wants the core
import torch
torch.set_num_threads(1)
own, matrix = os.getppid(), torch.randn(512, 512)
while os.getppid() == own:
    torch.mm(matrix, matrix)
"""
BROKEN = """
import os, signal, sys, time
own, rank = os.getppid(), int(sys.argv[1])
try:
    while os.getppid() == own:
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.095)
        os.kill(rank, signal.SIGCONT)
        time.sleep(0.005)
finally:
    os.kill(rank, signal.SIGCONT)
"""
PRIORITY = 50


def first_in_line(process: int) -> None:
    """Where the user may (root): whoever else uses the machine waits for us. Ranks and competitors take turns as equals."""
    if os.geteuid() == 0 and os.environ.get("REALTIME") == "1":
        os.sched_setscheduler(process, os.SCHED_RR, os.sched_param(PRIORITY))


class Competitors:
    """Processes that keep a core busy between :meth:`begin` and :meth:`end`."""

    def __init__(self, core: int, parts: Sequence[float], program: str = BUSY) -> None:
        self._all = [subprocess.Popen([sys.executable, "-c", program, str(part)]) for part in parts]
        for process in self._all:
            os.sched_setaffinity(process.pid, {core})
            if program == BUSY:
                first_in_line(process.pid)
        self.end()

    def begin(self) -> None:
        self._tell(signal.SIGCONT)

    def end(self) -> None:
        self._tell(signal.SIGSTOP)

    def close(self) -> None:
        self._tell(signal.SIGKILL)

    def _tell(self, number: signal.Signals) -> None:
        for process in self._all:
            process.send_signal(number)


def two_stages(graph: Graph) -> Plan:
    """A pipeline of two stages with one rank and half of the blocks each, 1F1B."""
    starts = [span_of(graph, path).start for path in block_paths(graph)]
    middle = starts[len(starts) // 2]
    cuts = [[op.name for op in graph.ops[:middle]], [op.name for op in graph.ops[middle:]]]
    micro = microbatches(graph, MICROBATCHES)
    stages = []
    for rank, part in enumerate(stage_graphs(micro.graphs[max(micro.graphs)], cuts)):
        splits = {op.name: (None,) for op in part.graph.ops}
        strategy = Strategy((("a", 1),), splits, {name: (Replicate(),) for name in part.graph.sources})
        stages.append(Stage(tuple(cuts[rank]), (rank,), strategy))
    return Plan.of(graph, stages, known_schedule("1f1b", 2, MICROBATCHES, 2))


class Job:
    """One rank, on a core of its own."""

    def __init__(self, search: str, model: str) -> None:
        self.rank = dist.get_rank()
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {self.rank})
            first_in_line(int(thread))
        torch.set_num_threads(1)
        torch.manual_seed(0)
        found = resolve(model, device="cpu")
        graph = capture(found.model, found.args, found.kwargs)
        if search == "pipeline":
            plan: Any = two_stages(graph)
        else:
            mesh = mesh_of(parse_cluster("local:2"), (2,))
            stated = formulate(graph, mesh, within=restriction(search, 1))
            plan = stated.strategy(solve(stated.problem).answer)
        self.model = parallelize(found.model, plan, found.args, found.kwargs, graph=graph)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.args, self.kwargs = found.args, found.kwargs

    def steps(self, count: int) -> list[float]:
        """Wall seconds of each."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self.model(*self.args, **self.kwargs).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        return seconds

    def only(self, rank: int, act: Callable[[], None]) -> None:
        """Something that one rank does, between two steps of all."""
        if self.rank == rank:
            act()
        dist.barrier()


def slowed(job: Job, parts: Sequence[float], rounds: int) -> dict[str, Any]:
    """On every rank: what the assistant does when a competitor begins and ends; then, in rounds, three blocks of steps right
    after each other: undisturbed, disturbed with equal rows, disturbed with the rows that the assistant had chosen ten steps
    after the competitor began."""
    competitors = Competitors(1, parts if job.rank == 1 else ())
    filler = Competitors(0, (1.0,) if job.rank == 0 else (), FILLER)
    assistant = assist(job.model, job.optimizer)
    equal, seen = assistant.rows, _recorded(assistant)
    try:
        before = job.steps(12)
        job.only(1, competitors.begin)
        helped = job.steps(10)
        rows = assistant.rows
        helped += job.steps(10)
        job.only(1, competitors.end)
        after = job.steps(20)
        back = assistant.rows
        assistant.leave()
        blocks: dict[str, list[list[float]]] = {"undisturbed": [], "disturbed": [], "other core busy": [], "chosen": []}
        for _ in range(rounds):
            for name in blocks:
                wanted = rows if name == "chosen" else equal
                job.only(1, competitors.end if name == "undisturbed" else competitors.begin)
                job.only(0, filler.begin if name == "other core busy" else filler.end)
                assistant.move(wanted)
                job.steps(1)
                blocks[name].append([round(s, 5) for s in job.steps(4)])
        assistant.move(equal)
    finally:
        competitors.close()
        filler.close()
    series = zip(("before", "helped", "after"), (before, helped, after), strict=True)
    return (
        {name: [round(s, 5) for s in seconds] for name, seconds in series}
        | {"rows": rows, "rows_after": back, "events": [e.as_dict() for e in assistant.events]}
        | {"blocks": blocks, "work and waits of both": seen, "load": os.getloadavg()[0]}
    )


def _recorded(assistant: Any) -> list[list[float]]:
    """What the assistant is told of every step: its number, the work of both ranks and their waits."""
    seen: list[list[float]] = []
    add = assistant.watch.add

    def told(step: int, work: Any, waited: Any, *rest: Any) -> None:
        seen.append([step, *(round(float(s), 4) for s in (*work, *waited))])
        add(step, work, waited, *rest)

    assistant.watch.add = told
    return seen


def told(found: dict[str, Any]) -> dict[str, Any]:
    """The figures: medians of blocks, and of what the rounds say was regained of the possible."""
    middle = statistics.median
    rounds = []
    for blocks in zip(*found["blocks"].values(), strict=True):
        quiet, slow, busy, chosen = map(middle, blocks)
        possible = 2 / (1 / quiet + 1 / busy)
        rounds.append((slow - chosen) / (slow - possible))
    quiet, slow, busy, chosen = (middle(s for block in blocks for s in block) for blocks in found["blocks"].values())
    possible = 2 / (1 / quiet + 1 / busy)
    return {
        "slowdown": slow / quiet,
        "undisturbed": quiet,
        "disturbed": slow,
        "other core busy": busy,
        "chosen": chosen,
        "possible": possible,
        "regained": (slow - chosen) / (slow - possible),
        "regained by round": [round(part, 3) for part in rounds],
        "moves": sum(event["event"] == "moved" for event in found["events"]),
        "slowest move": max((e["move_seconds"] for e in found["events"]), default=0.0),
        "after over before": middle(found["after"][10:]) / middle(found["before"]),
    }


def shares(job: Job, repeats: int) -> list[dict[str, Any]]:
    """Equal shares and shares by speed in turns, while the core of rank 1 is half busy."""
    competitors = Competitors(1, (1.0,) if job.rank == 1 else ())
    assistant = assist(job.model, job.optimizer, mode="watch")
    rows, found = sum(assistant.rows), []
    by_speed = [rows - rows // 3, rows // 3]
    try:
        job.only(1, competitors.begin)
        for _ in range(repeats):
            pair = {}
            for name, wanted in (("equal", [rows // 2] * 2), ("by speed", by_speed)):
                assistant.move(wanted)
                job.steps(2)
                pair[name] = [round(s, 5) for s in job.steps(8)]
            found.append(pair | {"rows": by_speed, "load": os.getloadavg()[0]})
    finally:
        competitors.close()
    assistant.move([rows // 2] * 2)
    assistant.leave()
    return found


def overhead(job: Job, repeats: int) -> dict[str, Any]:
    """Blocks of ten steps with and without the assistant in turns, and the processor seconds that its own code took."""
    turns: dict[str, list[float]] = {"with": [], "without": []}
    own = 0.0
    for number in range(repeats):
        order = ("with", "without") if number % 2 else ("without", "with")
        for name in order:
            assistant = assist(job.model, job.optimizer, mode="watch") if name == "with" else None  # moves cost apart
            if assistant is not None:
                assistant._warm = 1
                began = assistant._before

                def timed(*args: Any, act: Any = began) -> None:
                    nonlocal own
                    start = time.thread_time()
                    act(*args)
                    own += time.thread_time() - start

                assistant._hooks[0].remove()
                assistant._hooks[0] = job.model.register_forward_pre_hook(timed)
            job.steps(1)
            turns[name] += job.steps(10)
            if assistant is not None:
                assistant.leave()
    answer: dict[str, Any] = {name: [round(s, 5) for s in seconds] for name, seconds in turns.items()}
    return answer | {"own_seconds_per_step": own / (11 * repeats), "load": os.getloadavg()[0]}


def healthy(job: Job, steps: int) -> dict[str, Any]:
    """An undisturbed run, as it comes."""
    assistant = assist(job.model, job.optimizer)
    seconds = job.steps(steps)
    spread = [round(q, 5) for q in statistics.quantiles(seconds[10:], n=20)]
    return {"steps": steps, "quantiles": spread, "moves": [str(e) for e in assistant.events], "rows": assistant.rows}


def broken(job: Job) -> dict[str, Any]:
    """Rank 1 works a twentieth of the time; rank 0 starts and ends what stops it."""
    assistant = assist(job.model, job.optimizer)
    process = torch.tensor([os.getpid()])
    dist.broadcast(process, 1)
    before, out, back = job.steps(12), assistant.left_out, assistant.left_out
    stopping = subprocess.Popen([sys.executable, "-c", BROKEN, str(int(process))]) if job.rank == 0 else None
    slow: list[float] = []
    while not assistant.left_out and len(slow) < 30:
        slow += job.steps(1)
    out, without = assistant.left_out, job.steps(20)
    if stopping is not None:
        stopping.send_signal(signal.SIGINT)
        stopping.wait()
    dist.barrier()
    after: list[float] = []
    while assistant.left_out and len(after) < 200:
        after += job.steps(1)
    back = assistant.left_out
    again = job.steps(12)
    assistant.leave()
    series = {"before": before, "slow": slow, "without": without, "after": after, "again": again}
    return (
        {"left_out": out, "left_out_after": back, "events": [str(e) for e in assistant.events]}
        | {f"median {name}": round(statistics.median(s), 5) for name, s in series.items() if s}
        | {name: [round(s, 5) for s in seconds] for name, seconds in series.items()}
    )


def measured(
    what: Sequence[str], search: str, model: str, repeats: int, steps: int, slowdowns: Sequence[float]
) -> list[dict[str, Any]]:
    """On every rank: one job, and everything that is asked for with it."""
    job = Job(search, model)
    job.steps(8)
    about = {
        "model": model,
        "search": search,
        "torch": torch.__version__,
        "realtime": os.environ.get("REALTIME"),
    }
    found: list[dict[str, Any]] = []
    if "shares" in what:
        for pair in shares(job, repeats):
            ratio = statistics.median(pair["equal"]) / statistics.median(pair["by speed"])
            found.append({"what": "shares", "equal over by speed": round(ratio, 4)} | pair)
    if "slowed" in what:
        for slowdown in slowdowns:
            seen = slowed(job, SLOWDOWNS[slowdown], repeats)
            found.append({"what": "slowed", "asked": slowdown, "figures": told(seen) if job.rank == 0 else {}} | seen)
    if "overhead" in what:
        own = overhead(job, repeats)
        usual = statistics.median(own["without"])
        ratio, part = statistics.median(own["with"]) / usual, own["own_seconds_per_step"] / usual
        found.append({"what": "overhead", "with over without": round(ratio, 5), "own part": round(part, 6)} | own)
    if "healthy" in what:
        found.append({"what": "healthy"} | healthy(job, steps))
    if "broken" in what:
        found.append({"what": "broken"} | broken(job))
    return [line | about for line in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("slowed", "shares", "overhead", "healthy", "broken"))
    parser.add_argument("--search", default="data-parallel", choices=MODELS)
    parser.add_argument("--batch", type=int, help="rows of the batch, instead of those of the model by itself")
    parser.add_argument("--slowdowns", type=float, nargs="+", default=list(SLOWDOWNS), choices=SLOWDOWNS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    model = MODELS[asked.search]
    model = model if asked.batch is None else re.sub(r"batch=\d+", f"batch={asked.batch}", model)
    options = (asked.what, asked.search, model, asked.repeats, asked.steps, asked.slowdowns)
    for line in run_locally(measured, 2, *options)[0]:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
