"""Recorded steps on one GPU, two versions of this project in turns in one run: seconds, the host's share, memory, numbers.

    python bench/recorder_device.py --make build/plans                       # anywhere: plans, and of what they are
    PYTHONPATH=FOLDER python bench/recorder_device.py --make build/plans/old
    python bench/recorder_device.py --plans build/plans [--old FOLDER] [--json out.jsonl]     # on the GPU
    python bench/recorder_device.py --table out.jsonl

FOLDER holds the ``src`` of another version (or its ``shardwright``); without it this version runs alone. Every case and
version is a process of its own, all are made ready at once, and then the versions of a case take turns.
Collectives are PyTorch's fake ones, so this shows one rank, not the network. Prints a JSON line per case and version:

``seconds``, ``host``: medians of a step, and of that until everything is issued, the device idle before (``walls``,
``hosts``: all). ``eager_peak``: bytes handed out at the worst moment of an eager step, above what rests between steps;
``above``: bytes reserved from the device by recorded steps above the same; ``over_alive`` is their ratio. ``planned``: what
the log says of planned memory. ``graphs``: bytes of the device that neither PyTorch nor anything before knows of. Cases
called ``numbers`` train with changing batches, gradients left and dropout, recorded and eagerly: how far apart both are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent


class Case(NamedTuple):
    """A model in the zoo's words, rows and length of the whole batch, ranks and which of them; its plan: a search for one
    mesh, or stages, microbatches and a schedule."""

    model: str
    rows: int
    length: int
    ranks: int
    rank: int
    search: str = ""
    stages: int = 1
    microbatches: int = 1
    schedule: str = ""
    kind: str = "time"


LLAMA = "llama:layers=4,vocab=32000"
SEVEN = "llama:layers=16,width=4096,heads=32,kv_heads=32,inner=11008,vocab=32000"
MEDIUM = "gpt:layers=24,width=1024,heads=16"
SMALL = "gpt:layers=12,width=768,heads=12"
CASES = {
    "gpt2-small data-parallel": Case(SMALL, 64, 1024, 8, 0, "data-parallel"),
    "gpt2-small fsdp": Case(SMALL, 64, 1024, 8, 0, "fsdp"),
    "llama data-parallel": Case(LLAMA, 16, 2048, 8, 0, "data-parallel"),
    "llama fsdp": Case(LLAMA, 16, 2048, 8, 0, "fsdp"),
    "llama-7b stage zb-h1": Case(SEVEN, 8, 2048, 4, 1, "", 4, 8, "zb-h1"),
    "llama-7b stage 1f1b": Case(SEVEN, 8, 2048, 4, 1, "", 4, 8, "1f1b"),
    "gpt2-medium stage zb-h1": Case(MEDIUM, 32, 1024, 4, 1, "", 4, 8, "zb-h1"),
} | {f"numbers, {what}": Case("", 0, 0, 1, 0, kind="numbers") for what in ("loss", "logits", "dropout")}
TINY = {
    "tiny data-parallel": Case("llama:layers=2,width=64,heads=4,kv_heads=4,vocab=100", 16, 32, 8, 0, "data-parallel"),
    "tiny stage": Case("gpt:layers=4,width=64,heads=4,vocab=100", 8, 32, 4, 1, "", 4, 4, "zb-h1"),
}


def made(name: str, case: Case, folder: Path) -> None:
    """The plan of a case, as a file."""
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, Pipelining, plan_graph, plan_pipeline
    from shardwright.plans import to_json
    from shardwright.zoo.reference import resolve

    built = resolve(case.model, batch=case.rows, seq=case.length, dtype="bfloat16")
    graph = capture(built.model, built.args, built.kwargs)
    cluster = parse_cluster(f"{case.ranks}xH200")
    if case.search:
        options = Options(case.search, baselines=(), fewer_devices=False, ignore_device_memory=True)
        plan = plan_graph(graph, cluster, options)
    else:
        each = int(case.model.split("layers=")[1].split(",")[0]) // case.stages
        cuts = [f"blocks.{each * stage}" for stage in range(1, case.stages)]
        wanted = Pipelining(case.stages, case.microbatches, case.schedule, cuts)
        plan = plan_pipeline(graph, cluster, wanted, Options(optimizer="sgd", ignore_device_memory=True))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(to_json(plan))


# What follows runs in a process of its own, with one version of the project.


def recorder_of(module: Any) -> Any:
    """What replays the steps of a module: whatever of it counts replays, in this version or another."""
    planned = getattr(module, "_planned", module)
    for owner in (planned, *vars(module).values()):
        for name in ("recorder", "recorded", "replay", "_passes", "passes"):
            if hasattr(found := getattr(owner, name, None), "replays"):
                return found
    return None


class Worker:
    def __init__(self, case: Case, plan: Path, device: str) -> None:
        import torch

        from fake_rank import join_fake_group
        from shardwright.plans import from_json
        from shardwright.runtime import parallelize
        from shardwright.zoo.reference import resolve

        self.torch, self.device, self.said = torch, device, list[str]()
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("shardwright").addHandler(handler)
        logging.getLogger("shardwright").setLevel(logging.INFO)
        join_fake_group(case.ranks, case.rank)
        built = resolve(case.model, batch=case.rows, seq=case.length, dtype="bfloat16", device=device)
        self.module = parallelize(built.model, from_json(plan.read_text()), device=device)  # takes the parameters over
        self.args, self.kwargs = built.args, built.kwargs

    def step(self) -> None:
        from shardwright.verification.recorded import loss_of

        self.module.zero_grad(set_to_none=True)
        loss_of(self.module(*self.args, **self.kwargs)).backward()

    def ready(self) -> dict[str, Any]:
        """Eager steps, then recorded ones: what both hold."""
        torch, found = self.torch, dict[str, Any]()
        cuda = self.device == "cuda"
        for number in range(10):
            if cuda and number == 2:
                self.module.zero_grad(set_to_none=True)
                torch.cuda.synchronize()
                found["resting"] = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            began, outside = time.perf_counter(), self._outside()
            self.step()
            if cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            if self._outside() - outside > found.get("graphs", 0):
                found["graphs"], found["recording_seconds"] = self._outside() - outside, seconds
            if cuda and number == 2:
                found["eager_peak"] = torch.cuda.max_memory_allocated() - found["resting"]
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            found["above"] = torch.cuda.max_memory_reserved() - found["resting"]
            found["over_alive"] = round(found["above"] / found["eager_peak"], 4)
        recorder = recorder_of(self.module)
        found["replays"] = None if recorder is None else recorder.replays
        found["planned"] = self.said
        return found

    def _outside(self) -> int:
        """Bytes taken from the device beside PyTorch's."""
        if self.device != "cuda":
            return 0
        free, total = self.torch.cuda.mem_get_info()
        return int(total - free - self.torch.cuda.memory_reserved())

    def timed(self, steps: int) -> dict[str, float]:
        sync: Callable[[], None] = self.torch.cuda.synchronize if self.device == "cuda" else lambda: None
        sync()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        sync()
        wall, host = (time.perf_counter() - began) / steps, 0.0
        for _ in range(steps):
            began, cpu = time.perf_counter(), time.process_time()
            self.step()
            host += (time.perf_counter() - began) / steps
            sync()
        return {"wall": wall, "host": host, "cpu": time.process_time() - cpu}


def numbers(device: str, what: str) -> dict[str, Any]:
    """Losses and parameters of training, recorded and eagerly."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    import torch

    from fake_rank import join_fake_group
    from runtime.pipelines import halves, pipeline_plan
    from shardwright._torch_compat import local_of
    from shardwright.frontend import capture
    from shardwright.plans import Plan
    from shardwright.runtime import parallelize
    from shardwright.runtime.cuda_graphs import SWITCH

    class Model(torch.nn.Module):
        def __init__(self, rate: float, scalar: bool) -> None:
            super().__init__()
            self.first, self.scalar = torch.nn.Embedding(500, 256), scalar
            self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(256) for _ in range(4))
            self.drop, self.head = torch.nn.Dropout(rate), torch.nn.Linear(256, 500)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.first(tokens)
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = x + self.drop(torch.relu(layer(norm(x))))
            x = self.head(x)
            if not self.scalar:
                return x
            return torch.nn.functional.cross_entropy(x.flatten(0, 1), tokens.flatten())

    join_fake_group(1, 0)
    steps = 20

    def trained(
        graphs: bool, rate: float, scalar: bool, how: str, seed: int = 0
    ) -> tuple[list[float], Any, int, list[str]]:
        os.environ[SWITCH] = "1" if graphs else "0"
        torch.manual_seed(0)
        model, tokens = Model(rate, scalar), torch.randint(500, (16, 128))
        graph = capture(model, (tokens,))
        if how == "mesh":
            cuts, count, schedule = [[op.name for op in graph.ops]], 1, "1f1b"
        elif how == "accumulation":
            cuts, count, schedule = [[op.name for op in graph.ops]], 4, "1f1b"
        else:
            cuts, count, schedule = halves(graph, 2), 4, "interleaved-1f1b"
        plan: Plan = pipeline_plan(graph, cuts, count, schedule, devices=1)
        module = parallelize(model, plan, graph=graph, device=device)
        lr = 0.0 if rate else 1e-3
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
        generator, losses = torch.Generator().manual_seed(1), []
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("shardwright").addHandler(handler)
        torch.manual_seed(seed)
        for step in range(steps):
            batch = tokens if rate else torch.randint(500, tokens.shape, generator=generator)
            found = module(batch.to(device))
            loss = (
                found if scalar else torch.nn.functional.cross_entropy(found.flatten(0, 1), batch.to(device).flatten())
            )
            (loss * (2 if step == 15 else 1)).backward()
            losses.append(loss.item())
            optimizer.step()
            if step % 3:
                optimizer.zero_grad()
        logging.getLogger("shardwright").removeHandler(handler)
        recorder = recorder_of(module)
        return (
            losses,
            [local_of(p.detach()).cpu() for p in module.parameters()],
            0 if recorder is None else recorder.replays,
            said,
        )

    found: dict[str, Any] = {}
    for how in ("mesh", "accumulation", "pipeline"):
        try:
            if what == "numbers, dropout":
                first, _, replays, said = trained(True, 0.5, True, how)
                parts = first[: steps - replays], first[steps - replays :]
                found[how] = {
                    "replays": replays,
                    "different": len(set(parts[1])),
                    "mean eager, replayed": [sum(part) / max(len(part), 1) for part in parts],
                    "same seed, same losses": how == "mesh" or first == trained(True, 0.5, True, how)[0],
                    "said": said,
                }
                continue
            scalar = what == "numbers, loss"
            recorded, ours, replays, said = trained(True, 0.0, scalar, how)
            eager, theirs, _, _ = trained(False, 0.0, scalar, how)
            worst = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
            apart = max(abs(a - b) for a, b in zip(recorded, eager, strict=True))
            digest = hashlib.sha256(b"".join(p.float().numpy().tobytes() for p in ours)).hexdigest()[:12]
            found[how] = {"replays": replays, "losses": apart, "parameters": worst, "digest": digest, "said": said}
        except Exception as error:
            found[how] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return found


def work(name: str, case: Case, plans: Path, device: str) -> None:
    """Answer the lines that come in."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer

    def answer(row: Any) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    try:
        if case.kind == "numbers":
            answer(numbers(device, name))
            return
        worker = Worker(case, plans / f"{name}.json", device)
        answer(worker.ready())
        for line in sys.stdin:
            answer(worker.timed(int(line)))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {str(error)[:500]}"})


class Process:
    """One version of a case."""

    def __init__(self, name: str, version: str, source: Path, asked: argparse.Namespace) -> None:
        path = os.pathsep.join([str(source), str(HERE)])
        command = [sys.executable, str(HERE / "recorder_device.py"), "--work", name, "--device", asked.device]
        plans = Path(asked.plans or ".")
        own = plans / version
        command += ["--plans", str(own if own.is_dir() else plans)] + (["--tiny"] if asked.tiny else [])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self.name, self.version = name, version

    def ask(self, line: str | None = None) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            if line is not None:
                self.process.stdin.write(line + "\n")
                self.process.stdin.flush()
            return json.loads(self.process.stdout.readline() or '{"error": "it ended"}')
        except (OSError, ValueError) as error:
            return {"error": str(error)}

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def table(rows: list[dict[str, Any]]) -> None:
    """Both versions of every case side by side, as Markdown."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row.get("version", "pair")] = row
    print("| | ms a step, old → new | new ÷ old | host ms, old → new | above (resting) GiB, old → new |")
    print("|---|--:|--:|--:|--:|")
    for name, case in cases.items():
        if "pair" not in case:
            print(f"| {name} | {next((row['error'] for row in case.values() if 'error' in row), 'one version')} |")
            continue
        each = case["old"], case["new"]
        walls, hosts = (" → ".join(f"{row[what] * 1e3:.1f}" for row in each) for what in ("seconds", "host"))
        held = " → ".join(f"{row['above'] / 2**30:.2f} ({row['resting'] / 2**30:.2f})" for row in each)
        print(f"| {name} | {walls} | {case['pair']['new over old']['wall']:.3f} | {hosts} | {held} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, help="only make the plans, in this folder")
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--old", type=Path, help="the sources of another version")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this out on a CPU")
    parser.add_argument("--cases", nargs="*", help="these alone")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of these rows")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.table:
        table([json.loads(line) for line in asked.table.read_text().splitlines()])
        return
    cases = TINY if asked.tiny else CASES
    if asked.work:
        work(asked.work, cases[asked.work], asked.plans, asked.device)
        return
    chosen = {name: case for name, case in cases.items() if not asked.cases or name in asked.cases}
    if asked.make:
        sys.path.append(str(HERE.parent / "src"))  # after PYTHONPATH, which may hold another version
        for name, case in chosen.items():
            if case.kind == "time":
                made(name, case, asked.make)
                print(name, flush=True)
        return
    versions = {"new": HERE.parent / "src"} | ({"old": asked.old} if asked.old else {})
    running = {name: [Process(name, version, source, asked) for version, source in versions.items()] for name in chosen}
    began = time.perf_counter()

    def say(row: dict[str, Any]) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        if asked.json:
            with asked.json.open("a") as file:
                file.write(line + "\n")

    first = {one: one.ask() for processes in running.values() for one in processes}
    for name, processes in running.items():
        if chosen[name].kind == "numbers":
            for one in processes:
                say({"case": name, "version": one.version, **first[one]})
            continue
        alive = [one for one in processes if "error" not in first[one]]
        rows: dict[Process, list[dict[str, Any]]] = {one: [] for one in alive}
        for turn in range(asked.rounds):
            for one in alive if turn % 2 == 0 else alive[::-1]:
                rows[one].append(one.ask(str(asked.steps)))
        for one in processes:
            good = [row for row in rows.get(one, ()) if "error" not in row]
            measured: dict[str, Any] = {}
            if good:
                walls, hosts = [row["wall"] for row in good], [row["host"] for row in good]
                measured = {"seconds": statistics.median(walls), "host": statistics.median(hosts)}
                measured |= {"host_share": round(measured["host"] / measured["seconds"], 4)}
                measured |= {"walls": [round(x, 6) for x in walls], "hosts": [round(x, 6) for x in hosts]}
            say({"case": name, "version": one.version, **measured, **first[one]})
            one.end()
        if len(alive) == 2 and all(len(rows[one]) == asked.rounds for one in alive):
            pairs = list(zip(rows[alive[0]], rows[alive[1]], strict=True))
            if not any("error" in row for pair in pairs for row in pair):
                ratio = {what: statistics.median(a[what] / b[what] for a, b in pairs) for what in ("wall", "host")}
                say({"case": name, "new over old": ratio, "after": round(time.perf_counter() - began, 1)})


if __name__ == "__main__":
    main()
