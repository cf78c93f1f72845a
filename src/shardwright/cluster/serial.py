"""Clusters, devices and profiles as TOML, in and out. Every error names the key it is about.

A cluster file holds ``[[group]]`` tables (``nodes``, ``devices``, ``device``, ``link``, optional ``host``) and a
``[network]``. A ``device`` is a table, the name of a preset, or the path of a file written by ``shardwright calibrate``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.cluster import toml_text
from shardwright.cluster.hardware import MOST_DEVICES, Cluster, Device, Link, Node
from shardwright.cluster.profile import Curve, Profile
from shardwright.errors import ClusterError
from shardwright.files import read_text
from shardwright.records import shown

log = logging.getLogger("shardwright")
_MISSING = object()


def _get(table: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str, default: Any = _MISSING) -> Any:
    value = table.get(key, default)
    if value is _MISSING:
        raise ClusterError(f"{where} has no key {key!r}.", f"Add {key!r}.")
    if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        names = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise ClusterError(f"{where}: key {key!r} is {shown(value)}, not of type {names}.", f"Correct {key!r}.")
    return value


def _number(table: Mapping[str, Any], key: str, where: str, default: Any = _MISSING) -> float:
    """A finite number under a key."""
    return _finite(_get(table, key, NUMBER, where, default), f"{where}: key {key!r}")


def _finite(value: Any, what: str) -> float:
    try:
        if isinstance(value, NUMBER) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond every float
        pass
    raise ClusterError(f"{what} is {shown(value)}, not a number.", "Correct it.")


def _row(values: Any, what: str, length: int | None = None, positive: bool = True) -> tuple[Any, ...]:
    """A list of finite (positive) numbers, of a given length where that matters."""
    if not isinstance(values, list) or (length is not None and len(values) != length):
        raise ClusterError(f"{what} is {shown(values)}, not a list of {length or ''} numbers.", "Correct it.")
    row = tuple(_finite(value, what) for value in values)
    if positive and not all(value > 0 for value in row):
        raise ClusterError(f"{what} is {shown(values)}, and not all of it is positive.", "Correct it.")
    return row


def _only(table: Mapping[str, Any], allowed: set[str], where: str) -> None:
    if not isinstance(table, Mapping):
        raise ClusterError(f"{where} is {shown(table)}, not a table.", f"Known keys: {', '.join(sorted(allowed))}.")
    if unknown := sorted(set(table) - allowed):
        raise ClusterError(
            f"{where} has the unknown key {shown(unknown[0])}.", f"Known keys: {', '.join(sorted(allowed))}."
        )


NUMBER = (int, float)


def _some(values: Any, what: str) -> bool:
    """True for a list that holds something; anything else is refused."""
    if not isinstance(values, list) or not values:
        raise ClusterError(f"{what} is {shown(values)}, not a list with something in it.", "Correct it.")
    return True


def profile_from(table: Mapping[str, Any], where: str) -> Profile:
    """Read the ``[profile]`` table of a calibrated device, or the name of the preset it came with."""
    _only(table, {"label", "curves", "dispatch", "optimizer", "kernel_floor", "preset"}, where)
    if "preset" in table:
        from shardwright.cluster.parse import preset  # presets are themselves read by this module

        shipped = preset(_get(table, "preset", str, where))[0].device.profile
        label = _get(table, "label", str, where)
        if shipped is None:
            raise ClusterError(
                f"{where}: this version's {table['preset']} is not calibrated, and {label!r} is.", "Plan again."
            )
        if shipped.label != label:  # running needs no prices: a job must not stop because its device was measured again
            log.warning("Priced by %r; whatever is priced now is priced by %r, and may differ.", label, shipped.label)
        return shipped
    curves = []
    for name, data in _get(table, "curves", dict, where, {}).items():
        place = f"{where}.curves.{name}"
        if not isinstance(data, Mapping):
            raise ClusterError(f"{place} is {shown(data)}, not a table.", "Calibrate the device again.")
        features = tuple(_get(data, "features", list, place))
        rows = _get(data, "points", list, place)
        ratios = _row(_get(data, "ratios", list, place), f"{place}: key 'ratios'")
        if len(rows) != len(ratios) or not rows or not features or not all(isinstance(f, str) for f in features):
            raise ClusterError(f"{place}: 'points' and 'ratios' do not match.", "Calibrate the device again.")
        points = tuple(_row(row, f"{place}: a row of 'points'", len(features)) for row in rows)
        curves.append((name, Curve(features, points, ratios, _number(data, "fixed", place, 0.0))))
    dispatch = tuple(
        (name, *_row(pair, f"{where}: key 'dispatch.{name}'", 2, positive=False))
        for name, pair in _get(table, "dispatch", dict, where, {}).items()
    )
    optimizer = tuple(
        (name, *_row(row, f"{where}: key 'optimizer.{name}'", 3, positive=False))
        for name, row in _get(table, "optimizer", dict, where, {}).items()
    )
    floor = _number(table, "kernel_floor", where, 0.0)
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
                **({"fixed": curve.fixed} if curve.fixed else {}),
            }
            for name, curve in profile.curves
        },
    }


def device_from(table: Mapping[str, Any], where: str) -> Device:
    """Read a ``[device]`` table."""
    keys = {"name", "kind", "memory", "bandwidth", "launch_overhead", "peak_flops", "reserved", "source", "profile"}
    _only(table, keys, where)
    rates = _get(table, "peak_flops", dict, where)
    peaks = tuple((dtype, _finite(rate, f"{where}: key 'peak_flops.{dtype}'")) for dtype, rate in rates.items())
    profile = _get(table, "profile", dict, where, None)
    return Device(
        name=_get(table, "name", str, where),
        kind=_get(table, "kind", str, where, "cuda"),
        memory=int(_number(table, "memory", where)),
        bandwidth=_number(table, "bandwidth", where),
        launch_overhead=_number(table, "launch_overhead", where, 5e-6),
        peak_flops=peaks,
        reserves=_reserves(table.get("reserved", {}), f"{where}: key 'reserved'"),
        source=_get(table, "source", str, where, ""),
        profile=None if profile is None else profile_from(profile, f"{where}.profile"),
    )


def _reserves(value: Any, what: str) -> tuple[tuple[str, int], ...]:
    """Bytes by who takes them, or one number for all."""
    named = value if isinstance(value, dict) else {"device": value}
    return tuple((who, int(_finite(taken, f"{what}, {who}"))) for who, taken in named.items() if taken != 0)


def device_to(device: Device) -> dict[str, Any]:
    """A ``[device]`` table."""
    table: dict[str, Any] = {
        "name": device.name,
        "kind": device.kind,
        "memory": device.memory,
        "reserved": dict(device.reserves),
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
    fits = tuple(
        (kind, *_row(pair, f"{where}: key 'collectives.{kind}'", 2))
        for kind, pair in _get(table, "collectives", dict, where, {}).items()
    )
    ratios = tuple(
        (kind, tuple(_row(point, f"{where}: key 'ratios.{kind}'", 2) for point in points))
        for kind, points in _get(table, "ratios", dict, where, {}).items()
        if _some(points, f"{where}: key 'ratios.{kind}'")
    )
    return Link(
        name=_get(table, "name", str, where),
        latency=_number(table, "latency", where),
        bandwidth=_number(table, "bandwidth", where),
        shared=_get(table, "shared", bool, where, False),
        fits=fits,
        source=_get(table, "source", str, where, ""),
        processor_share=_number(table, "processor_share", where, 0.0),
        processor_seconds=_number(table, "processor_seconds", where, 0.0),
        ratios=ratios,
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
    return parse_toml(read_text(path, ClusterError), str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """A TOML text as a dictionary; ``where`` names it in errors."""
    try:
        return toml_text.loads(text)
    except ValueError as error:  # also numbers of more digits than Python converts
        raise ClusterError(f"{where!r} is not TOML: {error}.", "Correct that line.") from None
    except RecursionError:
        raise ClusterError(f"{where!r} is nested too deeply to be read.", "Is this the file that was meant?") from None


def cluster_from(data: Mapping[str, Any], name: str, resolve: Callable[[str], Node]) -> Cluster:
    """Read a cluster file's dictionary; ``resolve`` turns the name of a preset or a device file into a default node."""
    _only(data, {"name", "group", "network"}, f"cluster file {name!r}")
    groups = _get(data, "group", list, f"cluster file {name!r}")
    nodes: list[Node] = []
    for index, group in enumerate(groups):
        where = f"group[{index}]"
        if not isinstance(group, Mapping):
            raise ClusterError(f"{where} is {shown(group)}, not a table.", "Write [[group]].")
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
        if not 1 <= count <= MOST_DEVICES:
            raise ClusterError(f"{where}: key 'nodes' is {count}.", "Write how many nodes like this there are.")
        nodes.extend([Node(device, _get(group, "devices", int, where), link, host)] * count)
    if not nodes:
        raise ClusterError(f"cluster file {name!r} has no nodes.", "Add a [[group]] with nodes and devices.")
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
