"""Seconds in which gradients that several readers bring are added up: two are read, one is written."""

from __future__ import annotations

from collections import Counter

import numpy as np

from shardwright.cluster import Device, Mesh
from shardwright.costs.compute import kernel_seconds
from shardwright.graph import Graph
from shardwright.graph.backward import differentiated
from shardwright.operators.work import memory_work

PER_OCTAVE, SURELY = 16, 0.999
"""Measured seconds need not grow with bytes: that many sizes from one to twice it are looked at, and between two of them
seconds fall by less than this factor."""


def adding_seconds(size: int, device: Device, dtype: str) -> float:
    """Seconds in which one gradient of so many bytes is added to another."""
    return float(_seconds(np.array([size]), device, dtype)[0])


def least_adding(graph: Graph, mesh: Mesh) -> float:
    """Seconds that every split of a graph takes to add up gradients: all readers of a tensor but one bring another one, and
    no device holds less of it than its share.

    >>> least_adding(graph, mesh)  # doctest: +SKIP
    """
    reached, brought = differentiated(graph), Counter[str]()
    for op in graph.ops:
        if op.name in reached:
            brought.update(name for name in dict.fromkeys(op.inputs) if graph.tensors[name].grad)
    sizes, dtype = Counter[int](), trained_dtype(graph)
    for name, count in brought.items():
        sizes[graph.tensors[name].bytes] += count - 1
    octaves = 2.0 ** (np.arange(PER_OCTAVE * np.log2(mesh.devices) + 1) / PER_OCTAVE)
    least = (_seconds(size / mesh.devices * octaves, mesh.device, dtype).min() for size in sizes)
    return SURELY * float(sum(count * seconds for count, seconds in zip(sizes.values(), least, strict=True)))


def trained_dtype(graph: Graph) -> str:
    """That of the parameters that are trained."""
    return next((graph.tensors[p.tensor].dtype for p in graph.parameters if p.trainable), "float32")


def _seconds(sizes: np.ndarray, device: Device, dtype: str) -> np.ndarray:
    if device.kind != "cuda" or device.profile is None:
        return np.maximum(3 * sizes / device.bandwidth, device.launch_overhead)
    return kernel_seconds(memory_work("add/forward", dtype, 3.0 * np.maximum(sizes, 1)), device)
