"""Measuring collectives between local ranks, and calibrating ``local:N`` with all its processes at work.

One process per rank (gloo between CPU processes, NCCL between GPUs) times every collective over sizes, with the same
functional collectives the lowered program runs. Latency and bandwidth of each kind are fitted by least squares on relative
errors, in the form pricing uses them. The ranks of ``local:N`` measure their kernels at the same time, because that is how
they will compete for the machine's memory.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwright._torch_compat import collective, wait
from shardwright.cluster import calibration
from shardwright.cluster.calibration import Progress
from shardwright.cluster.fitting import calibrated
from shardwright.cluster.hardware import Device, Link
from shardwright.cluster.local import cores, quick_figures

SIZES = tuple(2**e for e in range(10, 25, 2))


def _runs(size: int, device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """Each collective about ``size`` bytes (the larger side of one rank)."""
    ranks = dist.get_world_size()
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]  # initialised by the caller
    whole = torch.ones(max(size // 4 // ranks, 1) * ranks, device=device)
    part = whole[: len(whole) // ranks].clone()
    counts = [len(part)] * ranks
    return {
        "all_reduce": lambda: wait(collective("all_reduce", whole, "sum", group)),
        "all_gather": lambda: wait(collective("all_gather_into_tensor", part, ranks, group)),
        "reduce_scatter": lambda: wait(collective("reduce_scatter_tensor", whole, "sum", ranks, group)),
        "all_to_all": lambda: wait(collective("all_to_all_single", whole, counts, counts, group)),
        "broadcast": lambda: wait(collective("broadcast", whole, 0, group)),
    }


def _time(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    times = []
    for repeat in range(7):
        dist.barrier()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat > 1:  # the first calls set up connections
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _rank(rank: int, ranks: int, folder: str, kind: str, seconds: float, kernels: bool, progress: Any) -> None:
    """What one process does; rank 0 writes the results."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(cores() // ranks, 1))
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        report = (lambda share, what: progress.put((share, what))) if rank == 0 else (lambda share, what: None)
        data = calibration.measure(device, seconds, report) if kernels else {}
        dist.barrier()
        points = []
        for number, size in enumerate(SIZES):
            report(number / len(SIZES), "collectives")
            for name, run in _runs(size, device).items():
                points.append({"kind": name, "bytes": size, "ranks": ranks, "seconds": _time(run, device)})
        if rank == 0:
            Path(folder, "data.json").write_text(json.dumps(data | {"collectives": points}))
            progress.put(None)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measure_ranks(
    ranks: int, kind: str, seconds: float, kernels: bool, report: Progress = lambda share, what: None
) -> dict[str, Any]:
    """Raw measurements with one process per rank: collectives, and kernels too where asked for."""
    context = mp.get_context("spawn")
    progress = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        running = mp.spawn(_rank, (ranks, folder, kind, seconds, kernels, progress), nprocs=ranks, join=False)
        assert running is not None
        while not running.join(timeout=0.2):  # raises what a rank raised
            while not progress.empty():
                if (message := progress.get()) is not None:
                    report(*message)
        return json.loads(Path(folder, "data.json").read_text())


def fit_link(points: list[dict[str, Any]], name: str) -> Link:
    """Latency and bandwidth of every collective; pricing multiplies the latency by log2 of the ranks."""
    fits = []
    for kind in dict.fromkeys(point["kind"] for point in points):
        rows = [point for point in points if point["kind"] == kind]
        seconds = np.array([row["seconds"] for row in rows])
        ranks = rows[0]["ranks"]
        rounds = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(kind, (ranks - 1) / ranks)
        matrix = np.array([[max(math.log2(ranks), 1.0), rounds * row["bytes"]] for row in rows])
        latency, inverse = np.linalg.lstsq(matrix / seconds[:, None], np.ones(len(rows)), rcond=None)[0]
        largest = max(rows, key=lambda row: row["bytes"])
        if latency <= 0:
            latency = min(seconds) / 2
        if inverse <= 0:
            inverse = largest["seconds"] / (rounds * largest["bytes"])
        fits.append((kind, float(latency), float(1 / inverse)))
    send = next(fit for fit in fits if fit[0] == "all_to_all")
    fits.append(("send", send[1] / 2, send[2]))  # two neighbours at once; latency is paid per direction
    plain = next(fit for fit in fits if fit[0] == "all_gather")
    return Link(name, plain[1], plain[2], False, tuple(fits), "measured")


def calibrate_local(
    processes: int, seconds: float = 60.0, report: Progress = lambda share, what: None
) -> tuple[Device, Link, dict[str, Any]]:
    """Measure this machine's CPU as ``processes`` ranks: the device each of them is, the link, the raw points."""
    guess, guessed_link = quick_figures(processes)
    if processes == 1:
        data, link = calibration.measure(torch.device("cpu"), seconds, report), guessed_link
    else:
        data = measure_ranks(processes, "cpu", seconds, True, report)
        link = fit_link(data["collectives"], "gloo over loopback")
    device = calibrated(data)
    return replace(device, name=guess.name, memory=guess.memory), link, data
