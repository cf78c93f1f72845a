"""``local:N``: N processes on this machine's CPU, talking over gloo; what tests and laptops run on.

The cores are shared, so each of N processes has a share of the machine's rate, memory and bandwidth. The figures are
cautious guesses from the number of cores until the machine has been calibrated; then the cached measurement replaces them.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.caches import keep, read_cached, replace_damaged
from shardwright.cluster import toml_text
from shardwright.cluster.hardware import MOST_DEVICES, Cluster, Device, Link, Node
from shardwright.cluster.serial import device_from, device_to, link_from, link_to, parse_toml
from shardwright.errors import ClusterError

BUSY = 0.5
"""Of its cores this share may be taken by others before a machine counts as busy."""

FLOPS_PER_CORE = 40e9
MEMORY_BANDWIDTH_PER_CORE = 6e9


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def others_load() -> float:
    """How many cores were taken during the last minute, where that is more than a quiet machine's; otherwise zero."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load if load > BUSY * cores() else 0.0


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 * 1024**3


_MEASURED: dict[int, tuple[Device, Link]] = {}
"""What this process measured itself, for where nothing can be kept on disk."""


def _name(processes: int) -> str:
    """The name of a calibration of ``local:N`` in the cache; the number of cores is part of it."""
    return f"local-{processes}-of-{cores()}-cores.toml"


def remembered(processes: int) -> tuple[Device, Link] | None:
    """The calibration of ``local:N`` on this machine, if there is one to be believed; a damaged one is taken away."""
    content = read_cached("", _name(processes))
    if content is None:
        return _MEASURED.get(processes)
    try:
        name = _name(processes)
        data = parse_toml(content.decode("utf-8", "replace"), name)
        device = device_from(data["device"], f"{name}: device")
        return device, link_from(data["link"], f"{name}: link")
    except (ClusterError, KeyError) as error:
        replace_damaged("", _name(processes), getattr(error, "message", f"{error} is missing"))
        return _MEASURED.get(processes)


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
    if not 1 <= processes <= MOST_DEVICES:
        raise ClusterError(f"'local:{processes}' has no sensible number of processes.", "Write 'local:2', for example.")
    device, link = remembered(processes) or quick_figures(processes)
    return Cluster(f"local:{processes}", (Node(device, processes, link),), link)


def remember(processes: int, device: Device, link: Link, load: float = 0.0) -> Path | None:
    """Keep a calibration of ``local:N`` for all later runs on this machine; where it was kept, if anywhere.

    ``load``: the cores that others had taken when it was made.
    """
    _MEASURED[processes] = device, link
    table = {"load": load, "device": device_to(device), "link": link_to(link)}
    return keep("", _name(processes), toml_text.dumps(table))


def made_on_busy_machine(processes: int) -> bool:
    """Whether the calibration that is kept was made while others used the cores: it holds until a better one is made."""
    content = read_cached("", _name(processes))
    if content is None or remembered(processes) is None:
        return False
    load = parse_toml(content.decode("utf-8", "replace"), _name(processes)).get("load", 0.0)
    return isinstance(load, float) and load > 0.0
