"""A captured model becomes a placement workload: every operator priced on every kind of device of a cluster.

Forward seconds, backward seconds and bytes come from the cost model; an operator's backward node shares its co-location
class. A parameter that several operators read (tied embeddings) does not tie them to one device, which would make one
stage of all that lies between: every reader holds a copy, and in training copies on other devices exchange gradient and
value with the first. A transfer is latency plus bytes over the slowest link between devices. Operators with several used
results (or several gradients to send back) get one free node per tensor in their class, so that each tensor is priced by
its own bytes. Memory of a node: its parameters (with gradients and optimizer state in training) and, in training, its
results, kept for backward; the micro-batches a pipeline has in flight multiply the latter and are the caller's to choose
through the batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shardwright.cluster import Axis, Cluster, Device, Link, Mesh
from shardwright.cluster.hardware import weakest
from shardwright.costs import op_times
from shardwright.costs import optimizer as optimizer_named
from shardwright.costs.collectives import send
from shardwright.graph import Graph, Op
from shardwright.operators import analyse
from shardwright.search.place.problem import DeviceKind, Workload


@dataclass
class _Nodes:
    """Rows of the workload under construction."""

    names: list[str] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    parameters: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    backward: list[bool] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def add(self, name: str, times: list[float], backward: bool, class_: int, sent: float = 0.0) -> int:
        self.names.append(name)
        self.times.append(times)
        self.memory.append(0.0)
        self.parameters.append(0.0)
        self.sent.append(sent)
        self.backward.append(backward)
        self.classes.append(class_)
        return len(self.names) - 1


def workload_of(graph: Graph, cluster: Cluster, *, training: bool = True, optimizer: str = "adamw") -> Workload:
    """Price a graph for placement on a cluster; unlike nodes become unlike device kinds, host CPUs a host kind.

    Example: ``workload_of(capture(model, args), parse_cluster("8xH200"))``.
    """
    devices, kinds = _kinds(cluster)
    link = _slowest(cluster)
    meshes = [Mesh((Axis("device", 1, link.latency, link.bandwidth),), device) for device in devices]
    seconds = {
        op.name: np.array(
            [op_times(op, analyse(op, graph.tensors), graph.tensors, [(None,)], mesh, training)[0] for mesh in meshes]
        )
        for op in graph.ops
    }
    nodes = _Nodes()
    classes = {op.name: i for i, op in enumerate(graph.ops)}
    free = [0.0] * len(kinds)

    def cost(tensor: str) -> float:
        return float(send(graph.tensors[tensor].bytes, link.latency, link.bandwidth))

    forward: dict[str, int] = {}
    origin: dict[str, int] = {}  # tensor -> the node that sends it
    for op in graph.ops:
        here = forward[op.name] = nodes.add(op.name, seconds[op.name][:, 0].tolist(), False, classes[op.name])
        nodes.edges += [(origin[name], here) for name in dict.fromkeys(op.inputs) if name in origin]
        used = [name for name in op.outputs if name is not None and graph.consumers.get(name)]
        for name in used:
            origin[name] = here
            if len(used) > 1:
                origin[name] = nodes.add(f"{op.name}.{name}", free, False, classes[op.name])
                nodes.edges.append((here, origin[name]))
            nodes.sent[origin[name]] = cost(name)
    if training:
        backward = {
            op.name: nodes.add(f"{op.name} backward", seconds[op.name][:, 1].tolist(), True, classes[op.name])
            for op in reversed(graph.ops)
            if op.grad and any(graph.tensors[name].grad for name in op.inputs)
        }
        for op in reversed(graph.ops):
            _send_gradients(graph, op, backward, nodes, cost, free)
        _tie_copies(graph, classes, nodes, cost, free)
    _fill_memory(graph, forward, seconds, nodes, training, 2.0 + optimizer_named(optimizer).states if training else 1.0)
    return Workload(
        kinds=kinds,
        times=np.array(nodes.times).reshape(len(nodes.names), len(kinds)),
        memory=np.array(nodes.memory),
        transfer=np.array(nodes.sent),
        edges=np.array(nodes.edges, dtype=np.int64).reshape(-1, 2),
        backward=np.array(nodes.backward, dtype=bool),
        classes=np.array(nodes.classes, dtype=np.int64),
        names=tuple(nodes.names),
        parameter_bytes=np.array(nodes.parameters),
        sync_bandwidth=link.bandwidth,
    )


def _send_gradients(
    graph: Graph, op: Op, backward: dict[str, int], nodes: _Nodes, cost: Callable[[str], float], free: list[float]
) -> None:
    """Edges from an operator's backward node to those of the operators whose results it read."""
    if op.name not in backward:
        return
    here = backward[op.name]
    sent = [
        name
        for name in dict.fromkeys(op.inputs)
        if graph.tensors[name].grad and name in graph.producer and graph.producer[name].name in backward
    ]
    for name in sent:
        source = here
        if len(sent) > 1:
            source = nodes.add(f"{op.name} backward.{name}", free, True, nodes.classes[here])
            nodes.edges.append((here, source))
        nodes.sent[source] = cost(name)
        nodes.edges.append((source, backward[graph.producer[name].name]))


def _tie_copies(
    graph: Graph, classes: dict[str, int], nodes: _Nodes, cost: Callable[[str], float], free: list[float]
) -> None:
    """Copies of a trained parameter send their gradient to the first reader's and get the new value back."""
    for parameter in graph.parameters:
        first, *others = graph.consumers.get(parameter.tensor, ()) or (None,)
        if first is None or not others or not parameter.trainable:
            continue
        name, price = parameter.tensor, cost(parameter.tensor)
        hub = nodes.add(f"{first.name} copy of {name}", free, True, classes[first.name], price)
        for op in others:
            gradient = nodes.add(f"{op.name} gradient of {name}", free, True, classes[op.name], price)
            value = nodes.add(f"{op.name} copy of {name}", free, True, classes[op.name])
            nodes.edges += [(gradient, hub), (hub, value)]


def _fill_memory(
    graph: Graph, forward: dict[str, int], seconds: dict[str, np.ndarray], nodes: _Nodes, training: bool, copies: float
) -> None:
    """State counts with every reader; in training, results are kept (a view keeps nothing of its own)."""
    trained = {p.tensor for p in graph.parameters if p.trainable}
    inputs = {i.tensor for i in graph.inputs}
    for op in graph.ops:
        row = forward[op.name]
        for name in dict.fromkeys(op.inputs):
            if name not in graph.producer and name not in inputs:
                size = float(graph.tensors[name].bytes)
                nodes.memory[row] += size * (copies if name in trained else 1.0)
                nodes.parameters[row] += size if training and name in trained else 0.0
        if training and seconds[op.name][:, 0].any():
            nodes.memory[row] += sum(float(graph.tensors[name].bytes) for name in op.outputs if name is not None)


def _kinds(cluster: Cluster) -> tuple[list[Device], tuple[DeviceKind, ...]]:
    counts: dict[Device, int] = {}
    hosts: dict[Device, int] = {}
    for node in cluster.nodes:
        counts[node.device] = counts.get(node.device, 0) + node.devices
        if node.host is not None:
            hosts[node.host] = hosts.get(node.host, 0) + 1
    kinds = [DeviceKind(d.name, n, float(d.usable_memory)) for d, n in counts.items()]
    kinds += [DeviceKind(d.name, n, host=True) for d, n in hosts.items()]
    return [*counts, *hosts], tuple(kinds)


def _slowest(cluster: Cluster) -> Link:
    """The link a transfer between stages may have to take: the network where there are several nodes."""
    links = [node.link.per_device(node.devices) for node in cluster.nodes]
    if len(cluster.nodes) > 1:
        links.append(cluster.network.per_device(max(node.devices for node in cluster.nodes)))
    return weakest(links)
