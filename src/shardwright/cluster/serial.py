"""Clusters, devices and profiles as TOML, in and out. Every error names the key it is about.

A cluster file holds ``[[group]]`` tables (``nodes``, ``devices``, ``device``, ``link``, optional ``host``) and a
``[network]``. A ``device`` is a table, the name of a preset, or the path of a file written by ``shardwright calibrate``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.cluster import toml_text
from shardwright.cluster.hardware import Cluster, Device, Link, Node
from shardwright.cluster.profile import Curve, Profile
from shardwright.errors import ClusterError

_MISSING = object()


def _get(table: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str, default: Any = _MISSING) -> Any:
    value = table.get(key, default)
    if value is _MISSING:
        raise ClusterError(f"{where} has no key {key!r}.", f"Add {key!r}.")
    if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        names = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise ClusterError(f"{where}: key {key!r} is {value!r}, not of type {names}.", f"Correct {key!r}.")
    return value


def _only(table: Mapping[str, Any], allowed: set[str], where: str) -> None:
    if unknown := sorted(set(table) - allowed):
        raise ClusterError(f"{where} has the unknown key {unknown[0]!r}.", f"Known keys: {', '.join(sorted(allowed))}.")


NUMBER = (int, float)


def profile_from(table: Mapping[str, Any], where: str) -> Profile:
    """Read the ``[profile]`` table of a calibrated device, or the name of the preset it came with."""
    _only(table, {"label", "curves", "dispatch", "optimizer", "kernel_floor", "preset"}, where)
    if "preset" in table:
        from shardwright.cluster.parse import preset  # presets are themselves read by this module

        shipped = preset(_get(table, "preset", str, where))[0].device.profile
        label = _get(table, "label", str, where)
        if shipped is None or shipped.label != label:
            raise ClusterError(
                f"{where}: this version's {table['preset']} is not the one {label!r} speaks of.", "Plan again."
            )
        return shipped
    curves = []
    for name, data in _get(table, "curves", dict, where, {}).items():
        place = f"{where}.curves.{name}"
        features = tuple(_get(data, "features", list, place))
        rows = _get(data, "points", list, place)
        ratios = _get(data, "ratios", list, place)
        if len(rows) != len(ratios) or not rows or any(len(row) != len(features) for row in rows):
            raise ClusterError(f"{place}: 'points' and 'ratios' do not match.", "Calibrate the device again.")
        points = tuple(tuple(float(v) for v in row) for row in rows)
        curves.append((name, Curve(features, points, tuple(float(r) for r in ratios))))
    dispatch = tuple((k, float(f), float(b)) for k, (f, b) in _get(table, "dispatch", dict, where, {}).items())
    optimizer = tuple((k, *(float(v) for v in row)) for k, row in _get(table, "optimizer", dict, where, {}).items())
    floor = float(_get(table, "kernel_floor", NUMBER, where, 0.0))
    return Profile(_get(table, "label", str, where), tuple(curves), dispatch, optimizer, floor)


def profile_to(profile: Profile) -> dict[str, Any]:
    """The ``[profile]`` table of a calibrated device."""
    if profile.preset:
        return {"label": profile.label, "preset": profile.preset}
    return {
        "label": profile.label,
        "kernel_floor": profile.kernel_floor,
        "dispatch": {name: [forward, backward] for name, forward, backward in profile.dispatch},
        "optimizer": {name: list(row) for name, *row in profile.optimizer},
        "curves": {
            name: {
                "features": list(curve.features),
                "points": [list(row) for row in curve.points],
                "ratios": list(curve.ratios),
            }
            for name, curve in profile.curves
        },
    }


def device_from(table: Mapping[str, Any], where: str) -> Device:
    """Read a ``[device]`` table."""
    keys = {"name", "kind", "memory", "bandwidth", "launch_overhead", "peak_flops", "reserved", "source", "profile"}
    _only(table, keys, where)
    rates = _get(table, "peak_flops", dict, where)
    for dtype, rate in rates.items():
        if not isinstance(rate, NUMBER):
            raise ClusterError(f"{where}: key 'peak_flops.{dtype}' is {rate!r}, not a number.", "Correct it.")
    profile = _get(table, "profile", dict, where, None)
    return Device(
        name=_get(table, "name", str, where),
        kind=_get(table, "kind", str, where, "cuda"),
        memory=int(_get(table, "memory", NUMBER, where)),
        bandwidth=float(_get(table, "bandwidth", NUMBER, where)),
        launch_overhead=float(_get(table, "launch_overhead", NUMBER, where, 5e-6)),
        peak_flops=tuple((dtype, float(rate)) for dtype, rate in rates.items()),
        reserved=int(_get(table, "reserved", NUMBER, where, 0)),
        source=_get(table, "source", str, where, ""),
        profile=None if profile is None else profile_from(profile, f"{where}.profile"),
    )


def device_to(device: Device) -> dict[str, Any]:
    """A ``[device]`` table."""
    table: dict[str, Any] = {
        "name": device.name,
        "kind": device.kind,
        "memory": device.memory,
        "reserved": device.reserved,
        "bandwidth": device.bandwidth,
        "launch_overhead": device.launch_overhead,
        "source": device.source,
        "peak_flops": device.rates,
    }
    if device.profile is not None:
        table["profile"] = profile_to(device.profile)
    return table


def link_from(table: Mapping[str, Any], where: str) -> Link:
    """Read a ``[link]`` or ``[network]`` table."""
    keys = {"name", "latency", "bandwidth", "shared", "source", "collectives"}
    _only(table, keys | {"processor_share", "processor_seconds", "ratios"}, where)
    fits = _get(table, "collectives", dict, where, {})
    for kind, pair in fits.items():
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(v, NUMBER) and v > 0 for v in pair)):
            raise ClusterError(f"{where}: key 'collectives.{kind}' is {pair!r}.", "Write [latency, bandwidth].")
    ratios = _get(table, "ratios", dict, where, {})
    for kind, points in ratios.items():
        pairs = isinstance(points, list) and all(isinstance(p, list) and len(p) == 2 for p in points)
        if not pairs or not points or not all(isinstance(v, NUMBER) and v > 0 for p in points for v in p):
            raise ClusterError(f"{where}: key 'ratios.{kind}' is {points!r}.", "Write [[bytes, ratio], ...].")
    return Link(
        name=_get(table, "name", str, where),
        latency=float(_get(table, "latency", NUMBER, where)),
        bandwidth=float(_get(table, "bandwidth", NUMBER, where)),
        shared=_get(table, "shared", bool, where, False),
        fits=tuple((kind, float(pair[0]), float(pair[1])) for kind, pair in fits.items()),
        source=_get(table, "source", str, where, ""),
        processor_share=float(_get(table, "processor_share", NUMBER, where, 0.0)),
        processor_seconds=float(_get(table, "processor_seconds", NUMBER, where, 0.0)),
        ratios=tuple((kind, tuple((float(b), float(r)) for b, r in points)) for kind, points in ratios.items()),
    )


def link_to(link: Link) -> dict[str, Any]:
    """A ``[link]`` table."""
    table: dict[str, Any] = {
        "name": link.name,
        "latency": link.latency,
        "bandwidth": link.bandwidth,
        "shared": link.shared,
        "source": link.source,
    }
    if link.processor_share:
        table["processor_share"] = link.processor_share
    if link.processor_seconds:
        table["processor_seconds"] = link.processor_seconds
    if link.ratios:
        table["ratios"] = {kind: [list(point) for point in points] for kind, points in link.ratios}
    if link.fits:
        table["collectives"] = {kind: [latency, bandwidth] for kind, latency, bandwidth in link.fits}
    return table


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dictionary; what is wrong with it is a ``ClusterError``."""
    try:
        return toml_text.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(f"cannot read {str(path)!r}: {error.strerror}.", "Check the path.") from None
    except (toml_text.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{str(path)!r} is not TOML: {error}.", "Correct that line.") from None


def cluster_from(data: Mapping[str, Any], name: str, resolve: Callable[[str], Node]) -> Cluster:
    """Read a cluster file's dictionary; ``resolve`` turns the name of a preset or a device file into a default node."""
    _only(data, {"name", "group", "network"}, f"cluster file {name!r}")
    groups = _get(data, "group", list, f"cluster file {name!r}")
    nodes: list[Node] = []
    for index, group in enumerate(groups):
        where = f"group[{index}]"
        if not isinstance(group, Mapping):
            raise ClusterError(f"{where} is {group!r}, not a table.", "Write [[group]].")
        _only(group, {"nodes", "devices", "device", "link", "host"}, where)
        given = _get(group, "device", (str, dict), where)
        base = resolve(given) if isinstance(given, str) else None
        device = base.device if base is not None else device_from(given, f"{where}.device")
        if base is None or "link" in group:
            link = link_from(_get(group, "link", dict, where), f"{where}.link")
        else:
            link = base.link
        host_given = _get(group, "host", (str, dict), where, None)
        host = None
        if host_given is not None:
            host = (
                resolve(host_given).device if isinstance(host_given, str) else device_from(host_given, f"{where}.host")
            )
        count = _get(group, "nodes", int, where, 1)
        if count < 1:
            raise ClusterError(f"{where}: key 'nodes' is {count}.", "Write how many nodes like this there are.")
        nodes.extend([Node(device, _get(group, "devices", int, where), link, host)] * count)
    network = _get(data, "network", dict, f"cluster file {name!r}", None)
    if network is None and len(nodes) > 1:
        raise ClusterError(f"cluster file {name!r} has several nodes but no key 'network'.", "Add a [network].")
    return Cluster(
        name=_get(data, "name", str, f"cluster file {name!r}", name),
        nodes=tuple(nodes),
        network=nodes[0].link if network is None else link_from(network, "network"),
    )


def cluster_to_toml(cluster: Cluster) -> str:
    """The cluster as a self-contained TOML file, which ``parse_cluster`` reads back to an equal one."""
    groups = []
    for part in cluster.groups():
        node = part.nodes[0]
        group: dict[str, Any] = {
            "nodes": len(part.nodes),
            "devices": node.devices,
            "device": device_to(node.device),
            "link": link_to(node.link),
        }
        if node.host is not None:
            group["host"] = device_to(node.host)
        groups.append(group)
    return toml_text.dumps({"name": cluster.name, "network": link_to(cluster.network), "group": groups})
