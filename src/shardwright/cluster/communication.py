"""Measuring collectives between ranks, and calibrating ``local:N`` and networks of hosts with all processes at work.

One process per rank (gloo between CPU processes, NCCL between GPUs) times every collective over sizes, with the same
functional collectives the lowered program runs: what a library does underneath (gloo's reduce-scatter is an all-reduce)
is in the figures. Latency is fitted to small messages and bandwidth to large ones, by least squares on relative errors, in
the form pricing uses them; how far long messages stay from that line is kept by size. Ranks measure their kernels at the
same time, because that is how they will compete for the machine's memory. On CPUs, communication also takes turns
with computation: how much of a core a collective under way takes from a running product is measured too.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from shardwright._torch_compat import collective, wait
from shardwright.cluster import calibration
from shardwright.cluster.calibration import Progress
from shardwright.cluster.fitting import calibrated
from shardwright.cluster.hardware import Device, Link
from shardwright.cluster.local import cores, quick_figures
from shardwright.loopback import stay_local

SIZES = tuple(2**e for e in range(10, 25, 2))
NETWORK_SIZES = (*SIZES, 2**26, 2**27)
"""Between hosts, whole layers travel in one message, and a slow network is not slow in proportion."""
LONG_SECONDS = 0.2
ROUNDS = 13
SMALL_BYTES, LARGE_BYTES = 2**12, 2**22


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


def _times(runs: Mapping[str, Callable[[], torch.Tensor]], device: torch.device) -> dict[str, float]:
    """Seconds of each collective: they take turns, so that a bad moment of the machine hits all of them, and the lower
    quartile counts, because what others do on it only ever adds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(ROUNDS):
        if repeat == 4 and _slowest(max(taken[0] for taken in times.values())) > LONG_SECONDS:
            break  # all ranks must agree on the number of rounds
        for name, run in runs.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat:  # the first call sets up connections
                times[name].append(time.perf_counter() - began)
    return {name: sorted(taken)[len(taken) // 4] for name, taken in times.items()}


def _slowest(seconds: float) -> float:
    together = torch.tensor([seconds])
    if dist.get_backend() == "nccl":
        together = together.cuda()
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return float(together)


def processor_share(size: int = 2**25, repeats: int = 5) -> float:
    """The share of a core that a collective under way takes from a computation on it (0: none; CPUs only).

    Products are counted while a collective is under way; what the process used of its core beyond them went into the
    collective. Only time on the core counts, so that other programs do not.
    """
    a, whole = torch.randn(192, 192), torch.ones(size // 4)
    product, used, alone = [], [], []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(100):
            _ = a @ a
        product.append((time.process_time() - began) / 100)
        dist.barrier()
        wall = time.perf_counter()
        dist.all_reduce(whole)
        alone.append(time.perf_counter() - wall)
        dist.barrier()
        began, done = time.process_time(), 0
        work = dist.all_reduce(whole, async_op=True)
        assert work is not None
        while not work.is_completed():
            _, done = a @ a, done + 1
        used.append(time.process_time() - began - done * statistics.median(product))
        work.wait()
    return min(max(statistics.median(used) / statistics.median(alone), 0.0), 0.9)


def processor_seconds(device: torch.device, calls: int = 40) -> float:
    """Seconds of a processor that a collective of a few bytes takes, issuing and completing it included."""
    run = _runs(1024, device)["all_gather"]
    run()
    began = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - began) / calls


def distributed_update(tensors: int = 16, repeats: int = 5) -> float:
    """Seconds an optimizer spends on a distributed tensor beyond a plain one, which is Python and the same at every size."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    seconds = []
    for distributed in (False, True):

        def make(distributed: bool = distributed) -> torch.Tensor:
            plain = torch.ones(256)
            return DTensor.from_local(plain, mesh, [Replicate()], run_check=False) if distributed else plain

        parameters = [torch.nn.Parameter(make()) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = make()
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        optimizer.step()
        times = []
        for _ in range(repeats):
            began = time.process_time()
            optimizer.step()
            times.append(time.process_time() - began)
        seconds.append(min(times) / tensors)
    return max(seconds[1] - seconds[0], 0.0)


def measure_group(
    device: torch.device, seconds: float, kernels: bool, sizes: Sequence[int], report: Progress
) -> dict[str, Any]:
    """What one rank of an initialised process group measures: kernels where asked for, then collectives with the others."""
    data = calibration.measure(device, seconds, report) if kernels else {}
    dist.barrier()
    points = []
    ranks = dist.get_world_size()
    for number, size in enumerate(sizes):
        report(number / len(sizes), "collectives")
        for name, taken in _times(_runs(size, device), device).items():
            points.append({"kind": name, "bytes": size, "ranks": ranks, "seconds": taken})
    data["collectives"] = points
    if device.type == "cpu":
        data["processor_share"] = processor_share()
        data["processor_seconds"] = processor_seconds(device)
        data["distributed_update"] = distributed_update()
    return data


def _rank(rank: int, ranks: int, folder: str, kind: str, seconds: float, kernels: bool, progress: Any) -> None:
    """What one process does; rank 0 writes the results."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(cores() // ranks, 1))
    backend = "nccl" if kind == "cuda" else "gloo"
    stay_local()
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        report = (lambda share, what: progress.put((share, what))) if rank == 0 else (lambda share, what: None)
        data = measure_group(device, seconds, kernels, SIZES, report)
        if rank == 0:
            Path(folder, "data.json").write_text(json.dumps(data))
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


def fit_link(points: list[dict[str, Any]], name: str, processor: tuple[float, float] = (0.0, 0.0)) -> Link:
    """Latency and bandwidth of every collective; pricing multiplies the latency by log2 of the ranks.

    ``processor`` is the share of a processor that a collective takes, and the seconds it takes at least. A gather or a
    scatter that was measured to take longer than an all-reduce of the same tensor is taken to last as long: it is a part
    of one (Thakur et al., 2005), and plans would go a long way round to avoid what was only a bad moment.
    """
    fits, ratios = [], []
    whole = {point["bytes"]: point["seconds"] for point in points if point["kind"] == "all_reduce"}
    points = [
        {**point, "seconds": min(point["seconds"], whole.get(point["bytes"], math.inf))}
        if point["kind"] in ("all_gather", "reduce_scatter")
        else point
        for point in points
    ]
    for kind in dict.fromkeys(point["kind"] for point in points):
        rows = [point for point in points if point["kind"] == kind]
        ranks = rows[0]["ranks"]
        hops = max(math.log2(ranks), 1.0)
        rounds = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(kind, (ranks - 1) / ranks)
        large = [row for row in rows if row["bytes"] >= LARGE_BYTES] or rows
        latency, inverse = 0.0, 0.0
        for _ in range(4):  # each is what the other leaves of the measured seconds
            rest = np.array([1 - hops * latency / row["seconds"] for row in large])
            weight = np.array([rounds * row["bytes"] / row["seconds"] for row in large])
            inverse = float(max(weight @ rest / (weight @ weight), 0.1 / weight.max()))
            small = [row for row in rows if row["bytes"] <= SMALL_BYTES] or rows
            left = [(row["seconds"] - inverse * rounds * row["bytes"]) / hops for row in small]
            latency = max(statistics.median(left), min(row["seconds"] for row in small) / 4)
        fits.append((kind, latency, 1 / inverse))
        fitted = [(row["bytes"], hops * latency + inverse * rounds * row["bytes"]) for row in rows]
        missed = [(size, row["seconds"] / line) for (size, line), row in zip(fitted, rows, strict=True)]
        ratios.append((kind, ((LARGE_BYTES / 16, 1.0), *(pair for pair in missed if pair[0] >= LARGE_BYTES / 4))))
    send = next(fit for fit in fits if fit[0] == "all_to_all")
    fits.append(("send", send[1] / 2, send[2]))  # two neighbours at once; latency is paid per direction
    plain = next(fit for fit in fits if fit[0] == "all_gather")
    return Link(name, plain[1], plain[2], False, tuple(fits), "measured", processor[0], tuple(ratios), processor[1])


def calibrate_hosts(
    seconds: float = 60.0, report: Progress = lambda share, what: None
) -> tuple[Device, Link, dict[str, Any]]:
    """Called on every rank of an initialised group with one CPU process per host: the device a host is, the network.

    Each process uses as many threads as it was given (``torch.set_num_threads``).
    """
    data = measure_group(torch.device("cpu"), seconds, True, NETWORK_SIZES, report)
    link = fit_link(data["collectives"], "gloo between hosts", (data["processor_share"], data["processor_seconds"]))
    device = calibrated(data)
    memory = quick_figures(1)[0].memory
    return replace(device, name=f"CPU, {torch.get_num_threads()} threads", memory=memory), link, data


def calibrate_local(
    processes: int, seconds: float = 60.0, report: Progress = lambda share, what: None
) -> tuple[Device, Link, dict[str, Any]]:
    """Measure this machine's CPU as ``processes`` ranks: the device each of them is, the link, the raw points."""
    guess, guessed_link = quick_figures(processes)
    if processes == 1:
        data, link = calibration.measure(torch.device("cpu"), seconds, report), guessed_link
    else:
        data = measure_ranks(processes, "cpu", seconds, True, report)
        link = fit_link(data["collectives"], "gloo over loopback", (data["processor_share"], data["processor_seconds"]))
    device = calibrated(data)
    return replace(device, name=guess.name, memory=guess.memory), link, data
