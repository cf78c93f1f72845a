"""Readers of placement workloads: the JSON of the 2020 placement paper, PipeDream's profile text, expert splits.

The JSON has ``maxFPGAs``, ``maxCPUs``, ``maxSizePerFPGA`` and nodes with ``fpgaLatency``, ``cpuLatency``; as an extension
a file may instead hold ``kinds`` (name, count, memory, host, transfer_factor) and nodes with a ``times`` list, one entry
per kind and ``null`` for unsupported, which is how unlike accelerators are written. PipeDream profiles hold one line a
node, then tab-indented edges; forward and backward times in milliseconds are added up and become seconds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.errors import ProblemError
from shardwright.search.place.problem import DeviceKind, Placement, Stage, Workload

_PROFILE_NODE = re.compile(r"^(\S+) -- (.*) -- (forward_compute_time=.*)$")
_PROFILE_EDGE = re.compile(r"^\s+(\S+) -- (\S+)$")


def read_workload(path: str | Path) -> Workload:
    """Read a placement workload from JSON.

    Example: ``read_workload("place/throughput/layer_bert24_inference.json").nodes`` is 32.
    """
    source = Path(path)
    try:
        data = json.loads(source.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProblemError(f"cannot read {source}: {error}.", "Give a placement workload in JSON.") from None
    try:
        return _workload(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ProblemError(
            f"{source} is not a placement workload: {type(error).__name__} {error}.",
            "It needs nodes, edges and either maxFPGAs, maxCPUs, maxSizePerFPGA or a list of kinds.",
        ) from None


def _workload(data: dict[str, Any]) -> Workload:
    nodes = data["nodes"]
    row = {node["id"]: i for i, node in enumerate(nodes)}
    if len(row) != len(nodes):
        raise ProblemError("two nodes have the same id.", "Give every node an id of its own.")
    if "kinds" in data:
        kinds = tuple(DeviceKind(**kind) for kind in data["kinds"])
        times = [[float("inf") if t is None else float(t) for t in node["times"]] for node in nodes]
    else:
        kinds = (
            DeviceKind("accelerator", int(data["maxFPGAs"]), float(data["maxSizePerFPGA"])),
            DeviceKind("cpu", int(data["maxCPUs"]), host=True),
        )
        times = [
            [float(node["fpgaLatency"]) if node["supportedOnFpga"] else float("inf"), float(node["cpuLatency"])]
            for node in nodes
        ]
    edges, transfer = _edges(data["edges"], row, len(nodes))
    coloured = [node.get("colorClass") for node in nodes]
    fresh = max((int(c) for c in coloured if c is not None), default=0) + 1
    sizes = np.array([float(node.get("size", 0.0)) for node in nodes])
    backward = np.array([bool(node.get("isBackwardNode", False)) for node in nodes])
    # Gradients are synchronised in training only; a workload without backward nodes has none.
    parameters = np.array([float(node.get("parameterBytes", node.get("size", 0.0))) for node in nodes])
    return Workload(
        kinds=kinds,
        times=np.array(times),
        memory=sizes,
        transfer=transfer,
        edges=edges,
        backward=backward,
        classes=np.array([fresh + i if c is None else int(c) for i, c in enumerate(coloured)]),
        names=tuple(str(node.get("name", node["id"])) for node in nodes),
        parameter_bytes=np.where(backward, 0.0, parameters) if backward.any() else np.zeros(len(nodes)),
        sync_bandwidth=float(data.get("syncBandwidth", float("inf"))),
    )


def _edges(edges: list[dict[str, Any]], row: dict[Any, int], n: int) -> tuple[np.ndarray, np.ndarray]:
    transfer = np.full(n, -1.0)
    ends = []
    for edge in edges:
        if edge["sourceId"] not in row or edge["destId"] not in row:
            raise ProblemError(
                f"edge {edge['sourceId']} -> {edge['destId']} names a node that does not exist.", "Check the ids."
            )
        source, cost = row[edge["sourceId"]], float(edge["cost"])
        if transfer[source] >= 0 and abs(transfer[source] - cost) > 1e-6:
            raise ProblemError(
                f"node {edge['sourceId']} has out-edges of cost {transfer[source]} and {cost}.",
                "The cost belongs to the source node: give all its out-edges the same.",
            )
        if transfer[source] < 0:
            transfer[source] = cost
        ends.append((source, row[edge["destId"]]))
    return np.array(ends, dtype=np.int64).reshape(-1, 2), np.maximum(transfer, 0.0)


def read_profile(
    path: str | Path, *, devices: int, bandwidth: float, transfers: bool = True, memory: float = float("inf")
) -> Workload:
    """Read a PipeDream profile for ``devices`` equal accelerators linked at ``bandwidth`` bytes/s; times in seconds.

    With ``transfers`` a node's output and its gradient cross the link (2 x activation bytes / bandwidth); without, stages
    are priced by computing and synchronising alone. Inputs (nodes named ``Input…``) cost nothing, as in PipeDream.
    Example: ``read_profile("vgg16.txt", devices=4, bandwidth=1.25e9)``.
    """
    source = Path(path)
    names: list[str] = []
    figures: list[dict[str, float]] = []
    row: dict[str, int] = {}
    edges: list[tuple[str, str]] = []
    try:
        lines = source.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemError(f"cannot read {source}: {error}.", "Give a PipeDream profile as text.") from None
    for number, line in enumerate(lines, start=1):
        if edge := _PROFILE_EDGE.match(line):
            edges.append((edge[1], edge[2]))
        elif node := _PROFILE_NODE.match(line):
            row[node[1]] = len(names)
            names.append(f"{node[1]} {node[2]}")
            pairs = (item.split("=") for item in node[3].split(", "))
            figures.append({key: sum(map(float, re.findall(r"[-+.\deE]+", value))) for key, value in pairs})
            if node[2].startswith("Input"):
                figures[-1] = {}
        elif line.strip():
            raise ProblemError(f"{source}:{number} is neither a node nor an edge: {line[:60]!r}.", "See the format.")
    unknown = [end for edge in edges for end in edge if end not in row]
    if unknown or not names:
        raise ProblemError(f"{source} has no node {unknown[0] if unknown else 'at all'}.", "Give a complete profile.")

    def column(key: str) -> np.ndarray:
        return np.array([figure.get(key, 0.0) for figure in figures])

    seconds = (column("forward_compute_time") + column("backward_compute_time")) / 1000.0
    return Workload(
        kinds=(DeviceKind("accelerator", devices, memory),),
        times=seconds[:, None],
        memory=column("activation_size") + column("parameter_size"),
        transfer=2.0 * column("activation_size") / bandwidth if transfers else np.zeros(len(names)),
        edges=np.array([(row[a], row[b]) for a, b in edges], dtype=np.int64).reshape(-1, 2),
        names=tuple(names),
        parameter_bytes=column("parameter_size"),
        sync_bandwidth=bandwidth,
    )


def read_split(path: str | Path, workload_path: str | Path) -> Placement:
    """Read a human expert's split (``fpgas`` and ``cpus``, each a list of ``nodes``) of the workload in the other file."""
    data = json.loads(Path(path).read_text())
    nodes = json.loads(Path(workload_path).read_text())["nodes"]
    row = {node["id"]: i for i, node in enumerate(nodes)}
    stages = tuple(Stage(k, (i,)) for k, key in enumerate(("fpgas", "cpus")) for i in range(len(data[key])))
    stage_of = np.full(len(nodes), -1, dtype=np.int64)
    for s, part in enumerate([*data["fpgas"], *data["cpus"]]):
        stage_of[[row[i] for i in part["nodes"] if i in row]] = s
    placed = {node.get("colorClass"): int(stage_of[i]) for i, node in enumerate(nodes) if stage_of[i] >= 0}
    for i, node in enumerate(nodes):  # experts placed the forward nodes; backward nodes go where their class goes
        if stage_of[i] < 0:
            stage_of[i] = placed.get(node.get("colorClass"), -1)
    if (stage_of < 0).any():
        raise ProblemError(f"{path} leaves node {nodes[int(np.argmin(stage_of))]['id']} unplaced.", "Place every node.")
    return Placement(stage_of, stages)
