"""``shardwright clusters``: the presets, and what a cluster that someone named looks like."""

from __future__ import annotations

import json
from typing import Any

import typer

from shardwright.cli._show import table


def clusters(
    cluster: str | None = typer.Argument(None, help="a cluster such as 4x8xA100-80GB, local:2 or file.toml"),
    as_json: bool = typer.Option(False, "--json", help="print JSON"),
    toml: bool = typer.Option(False, "--toml", help="print the cluster as a file to edit"),
) -> None:
    """List the devices Shardwright has figures for, or show one cluster and its meshes.

    Example: [bold]shardwright clusters 2x8xH200[/bold]
    """
    from shardwright.cluster import cluster_to_toml, meshes, parse_cluster, preset, preset_names

    if cluster is None:
        rows = [_device(preset(name)[0].device) for name in preset_names()]
        _print("devices", rows, as_json)
        return
    found = parse_cluster(cluster)
    if toml:
        print(cluster_to_toml(found), end="")
        return
    rows = [
        {
            "mesh": " × ".join(f"{axis.name}={axis.size}" for axis in mesh.axes),
            "latency µs": " / ".join(f"{1e6 * axis.latency:.3g}" for axis in mesh.axes),
            "GB/s each way": " / ".join(f"{axis.bandwidth / 1e9:.4g}" for axis in mesh.axes),
            "calibration": mesh.calibration,
        }
        for mesh in meshes(found)
    ]
    _print(f"{found.name}: {found.size} × {found.device.name}", rows, as_json)


def _device(device: Any) -> dict[str, Any]:
    return {
        "device": device.name,
        "memory GiB": round(device.memory / 2**30, 1),
        "GB/s": round(device.bandwidth / 1e9),
        "Tflop/s float32": round(device.peak("float32") / 1e12, 1),
        "Tflop/s bfloat16": round(device.rates["bfloat16"] / 1e12, 1) if "bfloat16" in device.rates else None,
        "calibration": device.calibration,
    }


def _print(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    cells = [["–" if value is None else str(value) for value in row.values()] for row in rows]
    table(title, list(rows[0]), cells)
