"""Many models as one rank of eight on a GPU, eager, recorded and compiled, beside one device by itself, in one run.

    python bench/device_models.py -o rows.jsonl [--only unet bert] [--modes fsdp-compiled …] [--limit 540]
    python bench/device_models.py -o more.jsonl --after rows.jsonl     # what has not been measured yet
    python bench/device_models.py --table rows.jsonl more.jsonl

Every engine is a process of its own. The processes of some models get ready side by side (build, plan, compile, warm up,
peak memory); once all are ready they are timed in turn, several rounds, while the others wait: nothing else runs then. A
row is written as soon as its model is done; one that fails is written with its reason. Engines are those of
``device_step``: the collectives are fake ones, so steps are what one rank computes. Bars: no failure; a step at most
``STEP`` times the better of one device's two; compiled, memory above what rests at most ``MEMORY`` times one device
compiled.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch

import device_step
import fake_rank

STEP, MEMORY = 1.05, 1.10
WARM = 9
"""Steps after the first: operators are traced after the third pass, graphs captured after the fifth."""
NOTE = "said: "
MODES = {
    "one": "one device",
    "one-compiled": "one device, compiled",
    "fsdp-eager": "our fsdp, eager",
    "fsdp": "our fsdp",
    "fsdp-compiled": "our fsdp, compiled",
    "dp-eager": "our data-parallel, eager",
    "dp": "our data-parallel",
    "dp-compiled": "our data-parallel, compiled",
}
ALL = (*device_step.NAMED, *device_step.DRAWN, *device_step.KEPT)
Row = dict[str, Any]


def answer(model: str, mode: str, printed: Any) -> None:
    """A worker: get ready, say so, then time so many steps for every line that arrives."""
    faulthandler.enable()  # a process that CUDA aborts says where
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logging.basicConfig(format=f"{NOTE}%(message)s")
    logging.getLogger("shardwright").setLevel(logging.INFO)
    fake_rank.join_fake_group(device_step.RANKS)

    def say(row: Row) -> None:
        print(json.dumps(row), file=printed, flush=True)

    began = time.perf_counter()
    step = device_step.engines(model, device)[MODES[mode]]()
    row: Row = {"built_seconds": time.perf_counter() - began}
    for number in range(1 + WARM):
        step()
        if number == 0:
            fake_rank.synchronise(device)
            row["first_seconds"] = time.perf_counter() - began - row["built_seconds"]
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        row["resting_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row["allocated_bytes"], row["reserved_bytes"] = (
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
        )
        row["pools"] = pools()
    row["predicted_bytes"] = getattr(step, "predicted", None)
    ours = getattr(step, "model", None)
    row["replayed"] = None if ours is None else getattr(ours._planned.recorder, "replays", 0)
    row["loss"] = float(step())
    step()
    row["ready_seconds"] = time.perf_counter() - began
    say(row)
    for line in sys.stdin:
        wall, host = fake_rank.timed(step, device, int(line))
        say({"wall": wall, "host": host})


def pools() -> list[Row]:
    """What the allocator has of the device now: bytes by pool, stream and kind of segment, and the large blocks in use."""
    found: dict[tuple[Any, ...], Row] = {}
    for segment in torch.cuda.memory_snapshot():
        pool, stream, kind = segment.get("segment_pool_id", (0, 0)), segment["stream"], segment["segment_type"]
        mine = found.setdefault((tuple(pool), stream, kind), {"segments": [], "used_bytes": 0, "large_blocks": []})
        mine["segments"].append(segment["total_size"])
        mine["used_bytes"] += segment["allocated_size"]
        sizes = [block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"]
        mine["large_blocks"] += [size for size in sizes if size > 2**20]
    return [
        {"pool": list(pool), "stream": stream, "kind": kind, "reserved_bytes": sum(mine["segments"])} | mine
        for (pool, stream, kind), mine in found.items()
    ]


class Worker:
    """The process of one engine, and what it has said."""

    def __init__(self, model: str, mode: str, folder: str) -> None:
        self.row: Row = {"model": model, "mode": mode, "walls": [], "hosts": []}
        self.log = Path(folder) / f"{model.replace('/', '_')}-{mode}.txt"
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": "3", "OMP_NUM_THREADS": "2"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", model, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env=os.environ | threads,
        )
        self.said: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(line)
        self.said.put(None)

    def hears(self, seconds: float) -> Row | None:
        """The next row that it says within these seconds; without one it is ended."""
        try:
            line = self.said.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            self.fails(f"said nothing for {seconds:.0f} s")
            return None
        if line is None:
            self.fails(f"ended with {self.process.wait()}")
            return None
        return json.loads(line)

    def fails(self, reason: str) -> None:
        said = [line for line in self.log.read_text(errors="replace").strip().splitlines() if line.strip()]
        self.row |= {"error": reason, "last_words": "\n".join(said[-60:])[-8000:]}
        self.ends()

    def times(self, steps: int) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        except OSError:
            return self.fails(f"ended with {self.process.wait()}")
        if (said := self.hears(60)) is not None:
            self.row["walls"].append(said["wall"])
            self.row["hosts"].append(said["host"])

    def ends(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def good(self) -> bool:
        return "error" not in self.row


def together(cases: Sequence[tuple[str, str]], patience: float, rounds: int, folder: str) -> Iterator[Row]:
    """Get these engines ready side by side, then time those of each model in turn."""
    workers = [Worker(model, mode, folder) for model, mode in cases]
    until = time.monotonic() + patience
    try:
        for worker in workers:
            if (said := worker.hears(until - time.monotonic())) is not None:
                worker.row |= said
        for model in dict.fromkeys(model for model, _ in cases):
            mine = [worker for worker in workers if worker.row["model"] == model]
            for number in range(1 + rounds):  # the first says how many steps take a third of a second
                for worker in mine if number % 2 else mine[::-1]:
                    if worker.good:
                        walls = worker.row["walls"]
                        worker.times(3 if not walls else max(3, min(20, round(0.35 / walls[0]))))
            for worker in mine:
                said = [line for line in worker.log.read_text(errors="replace").splitlines() if line.startswith(NOTE)]
                yield worker.row | {"notes": [line.removeprefix(NOTE)[:300] for line in said[:8]]}
    finally:
        for worker in workers:
            worker.ends()


def measured(asked: argparse.Namespace) -> None:
    done = {(row["model"], row["mode"]) for path in asked.after for row in _rows(path) if "error" not in row}
    left = [[(model, mode) for mode in asked.modes if (model, mode) not in done] for model in asked.only]
    left = [cases for cases in left if cases]
    ends = time.monotonic() + asked.limit
    about = {"torch": torch.__version__, "device": "cpu"}
    if torch.cuda.is_available():
        about["device"] = torch.cuda.get_device_properties(0).name
    with tempfile.TemporaryDirectory() as folder:
        while left and ends - time.monotonic() > 60:
            batch = left.pop(0)
            while left and len(batch) + len(left[0]) <= asked.at_once:
                batch += left.pop(0)
            began, reserve = time.monotonic(), 2.5 * len(batch) + 5
            for row in together(batch, min(asked.patience, ends - began - reserve), asked.rounds, folder):
                with asked.output.open("a") as file:
                    file.write(json.dumps(about | row) + "\n")
                shown = row.get("error") or f"{1e3 * statistics.median(row['walls'][1:]):.2f} ms"
                print(
                    f"{row['model']} {row['mode']}: {shown}, ready after {row.get('ready_seconds', 0):.0f} s",
                    flush=True,
                )
            print(f"  {len(batch)} engines in {time.monotonic() - began:.0f} s", flush=True)
    print("not begun:", [cases[0][0] for cases in left] or "nothing")


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(paths: Sequence[Path]) -> str:
    """Measured rows as Markdown: the last good row of every engine, or that it failed."""
    rows: dict[str, dict[str, Row]] = {}
    for row in (row for path in paths for row in _rows(path)):
        mine = rows.setdefault(row["model"], {})
        if "error" not in row or "error" in mine.get(row["mode"], {"error": ""}):
            mine[row["mode"]] = row
    lines = ["| ms a step | " + " | ".join(MODES) + " | ours ÷ the better of one device's: worst, best |"]
    lines += ["|---|" + "--:|" * (len(MODES) + 1)]
    failed: list[str] = []
    for model, mine in rows.items():
        took = {mode: 1e3 * statistics.median(row["walls"][1:]) for mode, row in mine.items() if "error" not in row}
        failed += [f"{model} {mode}: {row['error']}" for mode, row in mine.items() if "error" in row]
        alone = min((took[mode] for mode in ("one", "one-compiled") if mode in took), default=None)
        ratios = sorted(took[m] / alone for m in took if alone and not m.startswith("one"))
        cells = [f"{took[mode]:.2f}" if mode in took else ("failed" if mode in mine else "–") for mode in MODES]
        cells.append(f"{ratios[-1]:.2f}, **{ratios[0]:.2f}**" if ratios else "–")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| GiB above resting | " + " | ".join(MODES) + " | compiled ÷ one device compiled: fsdp, data-parallel |",
    ]
    lines += ["|---|" + "--:|" * (len(MODES) + 1)]
    predicted = ["", "| peak, GiB: reserved, predicted | " + " | ".join(list(MODES)[2:]) + " |", "|---|" + "--:|" * 6]
    for model, mine in rows.items():
        good = {mode: row for mode, row in mine.items() if "reserved_bytes" in row}
        above = {m: (row["reserved_bytes"] - row["resting_bytes"]) / 2**30 for m, row in good.items()}
        cells = [f"{above[mode]:.2f}" if mode in above else "–" for mode in MODES]
        one = above.get("one-compiled")
        both = [above[m] / one if one and m in above else None for m in ("fsdp-compiled", "dp-compiled")]
        cells.append(", ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in both))
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
        pairs = [
            (good[m]["reserved_bytes"], good[m]["predicted_bytes"]) if m in good else None for m in list(MODES)[2:]
        ]
        shown = ["–" if p is None else f"{p[0] / 2**30:.2f}, {p[1] / 2**30:.2f}" for p in pairs]
        predicted.append(f"| {model} | " + " | ".join(shown) + " |")
    return "\n".join(lines + predicted + ["", *failed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="rows are appended here")
    parser.add_argument(
        "--only", nargs="+", default=list(ALL), metavar="MODEL", help="of device_step's tables, or FILE.py:FUNCTION"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--after", type=Path, nargs="*", default=[], help="leave out what these have measured")
    parser.add_argument("--at-once", type=int, default=16, help="engines that get ready side by side")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds in which they must be ready")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--table", type=Path, nargs="+", help="print the tables of these rows")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        printed, sys.stdout = sys.stdout, sys.stderr  # the other one is for rows
        answer(*asked.worker, printed)
    elif asked.table:
        print(table(asked.table))
    else:
        measured(asked)


if __name__ == "__main__":
    main()
