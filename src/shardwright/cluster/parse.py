"""From a few words to a cluster: ``8xH200``, ``4x8xA100-80GB``, ``4xA100+4xH100``, ``local:2``, or a TOML file's path.

Presets are TOML files beside this module, with the figures of the vendors' datasheets and where they were read; one that
was never calibrated says so wherever its prices are shown.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from shardwright.cluster.hardware import MOST_DEVICES, NEVER_CALIBRATED, Cluster, Link, Node, weakest
from shardwright.cluster.local import local_cluster
from shardwright.cluster.profile import Profile
from shardwright.cluster.serial import cluster_from, device_from, link_from, profile_from, read_toml
from shardwright.cluster.slurm import job_cluster
from shardwright.errors import ClusterError
from shardwright.records import shown

_PRESETS = resources.files("shardwright.cluster") / "presets"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _preset_files() -> dict[str, Path]:
    """Plain names and aliases of the shipped presets, and their files."""
    found: dict[str, Path] = {}
    for entry in sorted(Path(str(_PRESETS)).glob("*.toml")):
        if entry.name.endswith(".profile.toml"):
            continue
        data = read_toml(entry)
        for name in [data["device"]["name"], *data.get("aliases", [])]:
            found[_plain(name)] = entry
    return found


@cache
def _preset(path: Path) -> tuple[Node, Link]:
    """A preset's usual node and the network between such nodes."""
    data = read_toml(path)
    table: dict[str, Any] = data["device"]
    measured = path.with_suffix(".profile.toml")
    device = device_from(table, f"{path.name}: device")
    if measured.exists():
        profile = replace(profile_from(read_toml(measured), measured.name), preset=device.name)
        overhead = profile.dispatch_of.get("add", (device.launch_overhead,))[0]
        device = replace(device, profile=profile, launch_overhead=overhead)
    elif "efficiency_of" in data:  # nobody measured this one: it stays as far from its own peaks as a relative does
        relative = preset(data["efficiency_of"])[0].device
        assert relative.profile is not None
        label = f"{NEVER_CALIBRATED} (shapes as efficient as on the {relative.name})"
        device = replace(device, profile=Profile(label, relative.profile.curves, preset=device.name))
    link = link_from(data["link"], f"{path.name}: link")
    network = link_from(data["network"], f"{path.name}: network")
    return Node(device, int(data["node"]["devices"]), link), network


def preset_names() -> list[str]:
    """The devices there are presets for."""
    return sorted({_preset(path)[0].device.name for path in _preset_files().values()})


def preset(name: str) -> tuple[Node, Link]:
    """The usual node of a preset device and the network between such nodes."""
    path = _preset_files().get(_plain(name))
    if path is None:
        raise ClusterError(
            f"there is no preset for the device {name!r}.",
            f"Choose one of {', '.join(preset_names())}, 'local:N', or the path of a cluster file.",
        )
    return _preset(path)


def _resolve(base: Path, name: str) -> Node:
    if name.endswith(".toml"):
        path = base / name
        data = read_toml(path)
        if "device" not in data:
            raise ClusterError(f"{str(path)!r} has no key 'device'.", "Name a file written by 'shardwright calibrate'.")
        device = device_from(data["device"], f"{path.name}: device")
        link = link_from(data["link"], f"{path.name}: link") if "link" in data else Link("none", 1e-6, device.bandwidth)
        return Node(device, 1, link)
    return preset(name)[0]


def _count(digits: str) -> int:
    """A number of devices; one with so many digits that nobody means it is just too large."""
    return int(digits) if len(digits) < 10 else MOST_DEVICES + 1


def parse_cluster(text: str) -> Cluster:
    """The cluster a user named.

    ``8xH200`` is one node of eight, ``16xH200`` two of them (a preset knows how many devices a node has), ``4x8xH200``
    four nodes of eight, ``local:2`` two processes on this machine's CPU, ``slurm`` what this Slurm job has been given
    (``slurm:H100`` where Slurm does not say what its GPUs are), anything ending in ``.toml`` a file. ``4xA100+4xH100`` are
    both, behind the slower of their networks.

    >>> parse_cluster("16xH200").name, len(parse_cluster("16xH200").nodes)
    ('16xH200', 2)
    >>> [node.device.name for node in parse_cluster("4xA100-80GB+4xH100").nodes]
    ['A100-80GB', 'H100']
    """
    text = text.strip()
    if text.endswith(".toml"):
        path = Path(text)
        data = read_toml(path)
        if "device" in data and "group" not in data:  # a calibrated device alone: one of it
            node = _resolve(path.parent, path.name)
            return Cluster(node.device.name, (node,), node.link)
        return cluster_from(data, path.stem, lambda name: _resolve(path.parent, name))
    if "+" in text:
        parts = [parse_cluster(part) for part in text.split("+")]
        return Cluster(text, tuple(n for part in parts for n in part.nodes), weakest(part.network for part in parts))
    if match := re.fullmatch(r"slurm(?::([A-Za-z].*))?", text, re.IGNORECASE):
        text = job_cluster(os.environ, match.group(1) or "")
    if match := re.fullmatch(r"local(?::(\d+))?", text):
        return local_cluster(_count(match.group(1) or "1"))
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z].*)", text)
    if match is None:
        raise ClusterError(
            f"{shown(text)} does not name a cluster.",
            "Write it like '8xH200', '4x8xA100-80GB', 'local:2' or 'file.toml'.",
        )
    first, second, name = match.groups()
    node, network = preset(name)
    counts = [_count(n) for n in (first, second) if n is not None]
    if any(n < 1 for n in counts) or math.prod(counts) > MOST_DEVICES:
        raise ClusterError(f"{shown(text)} asks for no sensible number of devices.", f"Write 1 to {MOST_DEVICES}.")
    if len(counts) == 2:
        nodes, devices = counts
    else:
        total = counts[0] if counts else 1
        devices = min(total, node.devices)
        if total % devices:
            raise ClusterError(
                f"{total} devices do not fill nodes of {node.devices} {node.device.name}.",
                f"Write nodes × devices, such as '{-(-total // node.devices)}x{node.devices}x{name}'.",
            )
        nodes = total // devices
    return Cluster(text, (Node(node.device, devices, node.link),) * nodes, network)
