"""One call that calibrates what a user names: this machine's GPU, its CPU as N processes, or hosts and their network."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.cluster import calibration, communication, toml_text
from shardwright.cluster.calibration import Progress
from shardwright.cluster.fitting import calibrated
from shardwright.cluster.hardware import Cluster, Device, Link, Node
from shardwright.cluster.local import cores, made_on_busy_machine, others_load, remember, remembered
from shardwright.cluster.serial import cluster_to_toml, device_to, link_to
from shardwright.errors import ClusterError


@dataclass(frozen=True)
class Calibrated:
    """The device file's text, the raw points and a sentence for the user."""

    text: str
    raw: dict[str, Any]
    summary: str


def _cuda(seconds: float, report: Progress) -> tuple[Device, Link | None, dict[str, Any]]:
    data = calibration.measure(torch.device("cuda"), seconds, report)
    link = None
    if torch.cuda.device_count() > 1:
        measured = communication.measure_ranks(torch.cuda.device_count(), "cuda", 0.0, False, report)
        data |= measured
        link = communication.fit_link(measured["collectives"], "NCCL")
    return calibrated(data), link, data


def _hosts(seconds: float, report: Progress) -> Calibrated:
    """One CPU process on every host, started by torchrun: a cluster file, the same on all of them."""
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ClusterError(
            "hosts are calibrated by one process on each of them.",
            "Start on every host: torchrun --nnodes=N --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT "
            "-m shardwright calibrate hosts -o cluster.toml",
        )
    started_here = not dist.is_initialized()
    if started_here:
        dist.init_process_group("gloo")
    try:
        device, link, raw = communication.calibrate_hosts(seconds, report)
        count = dist.get_world_size()
        text: list[Any] = [cluster_to_toml(Cluster(f"{count} hosts", (Node(device, 1, link),) * count, link))]
        dist.broadcast_object_list(text)  # every host must plan for the same figures
    finally:
        if started_here:
            dist.destroy_process_group()
    summary = f"{count} hosts: {device.name}, {link.name} at {link.bandwidth / 1e6:.0f} MB/s"
    return Calibrated(text[0], raw, summary)


def run(target: str, seconds: float, report: Progress = lambda share, what: None) -> Calibrated:
    """Calibrate ``auto``, ``cuda``, ``cpu``, ``local:N`` (whose result is also cached) or ``hosts`` (under torchrun).

    The text is that of a device file, for ``hosts`` that of a cluster file.
    """
    if target == "hosts":
        return _hosts(seconds, report)
    if target == "auto":
        target = "cuda" if torch.cuda.is_available() else "local:1"
    kept, load = "", others_load()
    link: Link | None
    if target == "cuda":
        if not torch.cuda.is_available():
            raise ClusterError("there is no CUDA device to calibrate.", "Calibrate the CPU with 'local:1'.")
        device, link, raw = _cuda(seconds, report)
    elif match := re.fullmatch(r"local(?::(\d+))?", target):
        processes = int(match.group(1) or 1)
        if processes < 1:
            raise ClusterError(f"{target!r} has no processes.", "Write 'local:1' or more.")
        device, link, raw = communication.calibrate_local(processes, seconds, report)
        kept = f"; kept in {place}" if (place := remember(processes, device, link, load)) else "; kept nowhere"
    else:
        raise ClusterError(f"cannot calibrate {target!r}.", "Calibrate 'auto', 'cuda', 'local:N' or 'hosts'.")
    table: dict[str, Any] = {"device": device_to(device)}
    if link is not None:
        table["link"] = link_to(link)
    best = ", ".join(f"{dtype} {rate / 1e12:.3g} Tflop/s" for dtype, rate in device.peak_flops)
    summary = f"{device.name}: {device.calibration}; {best}; memory {device.bandwidth / 1e9:.0f} GB/s{kept}"
    if load:
        summary += (
            f"\nThe machine was busy (load {load:.1f} on {cores()} cores), so these figures are those of a slower one. "
            "Calibrate again when it is quiet."
        )
    return Calibrated(toml_text.dumps(table), raw, summary)


def ensure_local(target: str, seconds: float = 40.0, report: Progress = lambda share, what: None) -> bool:
    """Calibrate ``local:N`` the first time it is planned for on this machine; whether that was needed.

    What was measured on a busy machine is measured again on a quiet one. Anything else than ``local:N`` is left alone.

    >>> ensure_local("8xH200")
    False
    """
    match = re.fullmatch(r"local(?::(\d+))?", target.strip())
    if match is None or len(match.group(1) or "1") > 4:
        return False
    processes = int(match.group(1) or 1)
    better = made_on_busy_machine(processes) and not others_load()
    if remembered(processes) is not None and not better:
        return False
    run(target.strip(), seconds, report)
    return True
