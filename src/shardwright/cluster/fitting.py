"""From raw measurements to a calibrated device: efficiency curves, dispatch, optimizer; peaks where no datasheet gives them.

Ratios are measured seconds over the roofline's ideal seconds for the same flops and bytes, on a GPU with a fixed cost added
to these where a curve has several features. A curve keeps the points
themselves, because kernels change with shape in steps that no smooth formula follows; one whose large sizes nobody had time
for is left out, and such kernels are priced like those of their kind. The optimizer's step is fitted by
least squares: the host's seconds on (1, tensors), the device's on bytes. A CPU, which updates one tensor after the other,
also gets a curve over their sizes: the temporaries of large ones miss its caches and are mapped anew every time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardwright.cluster import toml_text
from shardwright.cluster.cases_memory import NEVER_LARGE
from shardwright.cluster.hardware import Device, Link
from shardwright.cluster.parse import preset, preset_names
from shardwright.cluster.profile import SMALL, Curve, Profile
from shardwright.cluster.serial import device_to, link_to
from shardwright.errors import ClusterError

BEYOND_CACHES = 2**25


def peak_dtype(kernel: str, dtype: str) -> str:
    """Float32 convolutions run on tensor cores as tf32 unless that is switched off."""
    return "tf32" if dtype == "float32" and kernel in ("convolution", "pointwise", "grouped") else dtype


def _datasheet(machine: Mapping[str, Any]) -> Device | None:
    """The preset of the device that was measured, found by its name."""
    names = [n for n in preset_names() if n.lower().replace("-", " ").split()[0] in machine["name"].lower().split()]
    if machine["kind"] != "cuda" or not names:
        return None
    choices = [preset(name)[0].device for name in names]
    return min(choices, key=lambda d: abs(d.memory - machine["memory"]))


def _measured_peaks(data: Mapping[str, Any]) -> Device:
    """A device described by the best rates seen on it; memory's on what no cache holds, where that was measured."""
    machine, bandwidth = data["machine"], 0.0
    largest = max((p["bytes"] for p in data["points"] if not p["flops"] and p["step"] == "forward"), default=0.0)
    rates: dict[str, float] = defaultdict(float)
    for point in data["points"]:
        if point["kernel"] in ("matmul", "convolution", "pointwise"):
            dtype = peak_dtype(point["kernel"], point["dtype"])
            rates[dtype] = max(rates[dtype], point["flops"] / point["seconds"])
        elif not point["flops"] and point["step"] == "forward" and point["bytes"] >= min(largest, BEYOND_CACHES):
            bandwidth = max(bandwidth, point["bytes"] / point["seconds"])
    if not bandwidth or "float32" not in rates:
        raise ClusterError("too few kernels could be measured in the time given.", "Calibrate with more --seconds.")
    return Device(
        name=machine["name"],
        kind=machine["kind"],
        memory=int(machine.get("memory", 0)) or 8 * 1024**3,
        bandwidth=bandwidth,
        launch_overhead=data["dispatch"]["add"][0],
        peak_flops=tuple(sorted(rates.items())),
        reserves=_reserves(machine),
        source="best rates measured",
    )


def _reserves(machine: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """What to keep free on a GPU that no preset knows; its memory is what CUDA reports, without the driver's part."""
    if machine["kind"] != "cuda":
        return ()
    share = int(0.02 * machine.get("memory", 0))
    return ("context", 600_000_000), ("communication", 700_000_000), ("fragmentation", share)


def _curves(points: list[dict[str, Any]], device: Device) -> list[tuple[str, Curve]]:
    groups: dict[str, list[tuple[tuple[float, ...], float, float]]] = defaultdict(list)
    features: dict[str, tuple[str, ...]] = {}
    for point in points:
        name = f"{point['kernel']}/{point['dtype']}/{point['step']}"
        rate = device.peak(peak_dtype(point["kernel"], point["dtype"]))
        ideal = max(point["flops"] / rate, point["bytes"] / device.bandwidth)
        features[name] = tuple(point["features"])
        groups[name].append((tuple(point["features"].values()), point["seconds"], ideal))
    curves = []
    for name, rows in sorted(groups.items()):
        rows.sort()
        small = features[name] == ("bytes",) and rows[-1][0][0] < SMALL
        if small and name.split("/")[0] not in NEVER_LARGE:
            continue  # the time ran out: what small kernels take is mostly fixed and would make large ones absurdly dear
        several = len(features[name]) > 1 and device.kind == "cuda"
        fixed = _fixed(np.array([row[1:] for row in rows])) if several else 0.0
        ratios = tuple(float(f"{seconds / (ideal + fixed):.4g}") for _, seconds, ideal in rows)
        curves.append((name, Curve(features[name], tuple(row for row, *_ in rows), ratios, fixed)))
    return curves


def _fixed(measured: np.ndarray) -> float:
    """What a kernel takes whatever its size, from [points, (seconds, ideal seconds)]: with it the ratios differ least."""
    seconds, ideal = measured.T
    tried = [0.0, *np.geomspace(1e-6, max(float(np.median(seconds)), 1e-6), 40)]
    return float(f"{min(tried, key=lambda fixed: np.log(seconds / (ideal + fixed)).std()):.4g}")


def _optimizers(rows: list[dict[str, Any]]) -> list[tuple[str, float, float, float]]:
    fitted = []
    for name, dtype in sorted({(row["name"], row["dtype"]) for row in rows}):
        mine = [row for row in rows if (row["name"], row["dtype"]) == (name, dtype)]
        small = [row for row in mine if row["bytes"] <= 2**23]
        matrix = np.array([[1.0, row["tensors"]] for row in small])
        host = np.array([row["host"] for row in small])
        base, per_tensor = np.linalg.lstsq(matrix / host[:, None], np.ones(len(host)), rcond=None)[0]
        large = max(mine, key=lambda row: row["bytes"])
        fitted.append(
            (f"{name}/{dtype}", max(float(base), 0.0), max(float(per_tensor), 0.0), large["device"] / large["bytes"])
        )
    return fitted


def _update_curves(rows: list[dict[str, Any]], device: Device) -> list[tuple[str, Curve]]:
    """Per optimizer, seconds of one tensor's update over those of reading its parameter once."""
    sizes: dict[str, dict[float, float]] = defaultdict(dict)
    for row in sorted(
        rows, key=lambda row: -row["tensors"]
    ):  # of one size, the fewest tensors disturb each other least
        each = row["bytes"] / row["tensors"]
        sizes[f"{row['name']}/{row['dtype']}/update"][each] = row["host"] / (row["bytes"] / device.bandwidth)
    return [
        (
            name,
            Curve(("bytes",), tuple((size,) for size in sorted(found)), tuple(found[size] for size in sorted(found))),
        )
        for name, found in sorted(sizes.items())
    ]


def calibrated(data: Mapping[str, Any]) -> Device:
    """The measured device with its profile."""
    device = _datasheet(data["machine"]) or _measured_peaks(data)
    machine = data["machine"]
    dispatch = {name: (row[0], row[1]) for name, row in data["dispatch"].items()}
    if "distributed_update" in data:
        dispatch["distributed_update"] = (data["distributed_update"], 0.0)
    smallest = [p["seconds"] for p in data["points"] if not p["flops"] and p["step"] == "forward"]
    curves = _curves(data["points"], device)
    if device.kind == "cpu":
        curves += _update_curves(data["optimizers"], device)
    profile = Profile(
        label=f"measured {machine['date']} on {machine['name']} with torch {machine['torch']}",
        curves=tuple(curves),
        dispatch=tuple((name, *row) for name, row in dispatch.items()),
        optimizer=tuple(_optimizers(data["optimizers"])),
        kernel_floor=float(np.percentile(smallest, 2)),
    )
    return replace(device, profile=profile, launch_overhead=dispatch["add"][0])


def device_file(data: Mapping[str, Any], link: Link | None = None) -> str:
    """The device file ``shardwright calibrate`` writes."""
    table: dict[str, Any] = {"device": device_to(calibrated(data))}
    if link is not None:
        table["link"] = link_to(link)
    return toml_text.dumps(table)
