"""Readers of placement workloads: the JSON of the 2020 placement paper, PipeDream's profile text, expert splits.

The JSON has ``maxFPGAs``, ``maxCPUs``, ``maxSizePerFPGA`` and nodes with ``fpgaLatency``, ``cpuLatency``; as an extension
a file may instead hold ``kinds`` (name, count, memory, host, transfer_factor) and nodes with a ``times`` list, one entry
per kind and ``null`` for unsupported, which is how unlike accelerators are written. PipeDream profiles hold one line a
node, then tab-indented edges; forward and backward times in milliseconds are added up and become seconds.
"""

# ruff: noqa: N815 - the keys are the format's
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shardwright.errors import ProblemError
from shardwright.files import read_json, read_text
from shardwright.records import read_record, shown
from shardwright.search.place.problem import DeviceKind, Placement, Stage, Workload

_PROFILE_NODE = re.compile(r"^(\S+) -- (.*) -- (forward_compute_time=.*)$")
_PROFILE_EDGE = re.compile(r"^\s+(\S+) -- (\S+)$")


def read_workload(path: str | Path) -> Workload:
    """Read a placement workload from JSON.

    Example: ``read_workload("place/throughput/layer_bert24_inference.json").nodes`` is 32.
    """
    file = read_record(
        _File,
        read_json(path, ProblemError),
        where=f"{path} is not a placement workload",
        error=ProblemError,
        remedy="It needs nodes, edges and either maxFPGAs, maxCPUs, maxSizePerFPGA or a list of kinds.",
    )
    return _workload(file)


@dataclass(frozen=True)
class _Node:
    others_allowed: ClassVar[bool] = True
    id: int | str
    times: tuple[float | None, ...] | None = None
    fpgaLatency: float | None = None
    cpuLatency: float | None = None
    supportedOnFpga: bool | int = False
    size: float = 0.0
    parameterBytes: float | None = None
    isBackwardNode: bool | int = False
    colorClass: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class _Edge:
    others_allowed: ClassVar[bool] = True
    sourceId: int | str
    destId: int | str
    cost: float


@dataclass(frozen=True)
class _Kind:
    name: str
    count: int
    memory: float = float("inf")
    host: bool = False
    transfer_factor: float = 1.0


@dataclass(frozen=True)
class _File:
    others_allowed: ClassVar[bool] = True
    nodes: tuple[_Node, ...]
    edges: tuple[_Edge, ...]
    kinds: tuple[_Kind, ...] | None = None
    maxFPGAs: int | None = None
    maxCPUs: int | None = None
    maxSizePerFPGA: float | None = None
    syncBandwidth: float = float("inf")


def _workload(file: _File) -> Workload:
    nodes = file.nodes
    if not nodes:
        raise ProblemError("the workload has no nodes.", "Give at least one.")
    row = {node.id: i for i, node in enumerate(nodes)}
    if len(row) != len(nodes):
        raise ProblemError("two nodes have the same id.", "Give every node an id of its own.")
    if file.kinds is not None:
        kinds = tuple(DeviceKind(k.name, k.count, k.memory, k.host, k.transfer_factor) for k in file.kinds)
        wrong = next((node.id for node in nodes if node.times is None or len(node.times) != len(kinds)), None)
        if wrong is not None:
            raise ProblemError(f"node {shown(wrong)} has no time for each of {len(kinds)} kinds.", "Give one, or null.")
        times = [[float("inf") if t is None else t for t in node.times or ()] for node in nodes]
    else:
        if file.maxFPGAs is None or file.maxCPUs is None or file.maxSizePerFPGA is None:
            raise ProblemError(
                "not a placement workload: it has neither kinds nor maxFPGAs, maxCPUs, maxSizePerFPGA.", "Add them."
            )
        kinds = (
            DeviceKind("accelerator", file.maxFPGAs, file.maxSizePerFPGA),
            DeviceKind("cpu", file.maxCPUs, host=True),
        )
        if untimed := [n.id for n in nodes if n.cpuLatency is None or (n.supportedOnFpga and n.fpgaLatency is None)]:
            raise ProblemError(
                f"node {shown(untimed[0])} has no latency.", "Give cpuLatency, and fpgaLatency if supported."
            )
        times = [
            [float(node.fpgaLatency or 0.0) if node.supportedOnFpga else float("inf"), float(node.cpuLatency or 0.0)]
            for node in nodes
        ]
    edges, transfer = _edges(file.edges, row, len(nodes))
    fresh = max((node.colorClass for node in nodes if node.colorClass is not None), default=0) + 1
    if fresh > 2**62:
        raise ProblemError(f"the class {fresh - 1} is too large a number.", "Number the classes from 0.")
    sizes = np.array([node.size for node in nodes])
    backward = np.array([bool(node.isBackwardNode) for node in nodes], dtype=bool)
    # Gradients are synchronised in training only; a workload without backward nodes has none.
    parameters = np.array([node.size if node.parameterBytes is None else node.parameterBytes for node in nodes])
    return Workload(
        kinds=kinds,
        times=np.array(times).reshape(len(nodes), len(kinds)),
        memory=sizes,
        transfer=transfer,
        edges=edges,
        backward=backward,
        classes=np.array([fresh + i if n.colorClass is None else n.colorClass for i, n in enumerate(nodes)]),
        names=tuple(str(node.id if node.name is None else node.name) for node in nodes),
        parameter_bytes=np.where(backward, 0.0, parameters) if backward.any() else np.zeros(len(nodes)),
        sync_bandwidth=file.syncBandwidth,
    )


def _edges(edges: Sequence[_Edge], row: dict[Any, int], n: int) -> tuple[np.ndarray, np.ndarray]:
    transfer = np.full(n, -1.0)
    ends = []
    for edge in edges:
        if edge.sourceId not in row or edge.destId not in row:
            raise ProblemError(
                f"edge {shown(edge.sourceId)} -> {shown(edge.destId)} names a node that does not exist.",
                "Check the ids.",
            )
        source, cost = row[edge.sourceId], edge.cost
        if transfer[source] >= 0 and abs(transfer[source] - cost) > 1e-6:
            raise ProblemError(
                f"node {shown(edge.sourceId)} has out-edges of cost {transfer[source]} and {cost}.",
                "The cost belongs to the source node: give all its out-edges the same.",
            )
        if transfer[source] < 0:
            transfer[source] = cost
        ends.append((source, row[edge.destId]))
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
    for number, line in enumerate(read_text(source, ProblemError).splitlines(), start=1):
        if edge := _PROFILE_EDGE.match(line):
            edges.append((edge[1], edge[2]))
        elif node := _PROFILE_NODE.match(line):
            row[node[1]] = len(names)
            names.append(f"{node[1]} {node[2]}")
            try:
                pairs = (item.split("=") for item in node[3].split(", "))
                figures.append({key: sum(map(float, re.findall(r"[-+.\deE]+", value))) for key, value in pairs})
            except ValueError:
                raise ProblemError(
                    f"{source}:{number} holds no figures: {node[3][:60]!r}.", "See the format."
                ) from None
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
    data = read_json(path, ProblemError)
    nodes = read_json(workload_path, ProblemError)["nodes"]
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
