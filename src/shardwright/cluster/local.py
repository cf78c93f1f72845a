"""``local:N``: N processes on this machine's CPU, talking over gloo; what tests and laptops run on.

The cores are shared, so each of N processes has a share of the machine's rate, memory and bandwidth. The figures are
cautious guesses from the number of cores until the machine has been calibrated; then the cached measurement replaces them.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.cluster import toml_text
from shardwright.cluster.hardware import Cluster, Device, Link, Node
from shardwright.cluster.serial import device_from, device_to, link_from, link_to, read_toml
from shardwright.errors import ClusterError

FLOPS_PER_CORE = 40e9
MEMORY_BANDWIDTH_PER_CORE = 6e9


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 * 1024**3


def cache_file(processes: int) -> Path:
    """Where the calibration of ``local:N`` is kept; the number of cores is part of the name."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardwright"
    return folder / f"local-{processes}-of-{cores()}-cores.toml"


def quick_figures(processes: int) -> tuple[Device, Link]:
    """An uncalibrated guess: a share of the cores for each process, gloo over the loopback interface."""
    share = max(cores() / processes, 0.25)
    relative = {"float32": 1.0, "float64": 0.5, "bfloat16": 0.5, "float16": 0.125}
    rates = tuple((dtype, FLOPS_PER_CORE * share * rate) for dtype, rate in relative.items())
    device = Device(
        name=f"CPU, {cores()} cores / {processes}",
        kind="cpu",
        memory=_memory_bytes() // processes,
        bandwidth=MEMORY_BANDWIDTH_PER_CORE * share,
        launch_overhead=5e-6,
        peak_flops=rates,
        source="guessed from the number of cores",
    )
    return device, Link("gloo over loopback", latency=60e-6, bandwidth=1.0e9, source="guessed")


def local_cluster(processes: int) -> Cluster:
    """One node with this machine's CPU as ``processes`` devices, calibrated if it ever was."""
    if processes < 1:
        raise ClusterError(f"'local:{processes}' has no processes.", "Write 'local:1' or more.")
    device, link = quick_figures(processes)
    path = cache_file(processes)
    if path.exists():
        data = read_toml(path)
        device = device_from(data["device"], f"{path.name}: device")
        link = link_from(data["link"], f"{path.name}: link")
    return Cluster(f"local:{processes}", (Node(device, processes, link),), link)


def remember(processes: int, device: Device, link: Link) -> Path:
    """Keep a calibration of ``local:N`` for all later runs on this machine."""
    path = cache_file(processes)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = toml_text.dumps({"device": device_to(device), "link": link_to(link)})
    # Another process may read or write the same file: replace it in one move.
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(text)
    scratch.replace(path)
    return path
