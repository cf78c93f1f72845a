"""Seconds of kernels as another engine runs them: by the tables of the device's primitives, at that engine's pace.

Products take what the device's table says (:class:`~shardwright.cluster.primitives.Products`), over the engine's pace.
Attention that is not fused is two batched products with softmax and dropout over all scores between them, each of which
goes through memory. Everything else is bound by the bytes it moves. What no table knows (convolutions, recurrent
layers, products in full precision) keeps the price that the device has without an engine.
"""

from __future__ import annotations

import numpy as np

from shardwright.cluster.engine import Engine
from shardwright.cluster.hardware import Device
from shardwright.cluster.primitives import primitives
from shardwright.errors import ClusterError
from shardwright.graph.core import DTYPE_BYTES
from shardwright.operators.work import Work

FLOOR = 2e-6
"""Seconds of the shortest kernel."""
FUSED_BACKWARD = 0.85
"""Pace of fused attention's backward pass over its forward one's (FlashAttention-2, arXiv 2307.08691, figures 4 to 6)."""
HALVES = ("bfloat16", "float16")
"""Products and attention were published in these alone."""
KEPT_APART = ("convolution", "pointwise", "depthwise", "channelwise", "grouped", "lstm")


def _engine(device: Device) -> Engine:
    assert device.engine is not None
    return device.engine


def product_seconds(device: Device, sizes: np.ndarray) -> np.ndarray:
    """Seconds of products of [m, n, k, batch]."""
    table = primitives(device.name)
    if table is None or table.products is None:
        raise ClusterError(
            f"nobody published products of the {device.name}, so no engine has a price there.", "Price it without one."
        )
    return table.products.seconds(sizes) / _engine(device).pace(device.name).products


def moved_seconds(device: Device, amounts: np.ndarray) -> np.ndarray:
    """Seconds of kernels that move so many bytes."""
    return np.asarray(amounts) / (device.bandwidth * _engine(device).pace(device.name).memory) + FLOOR


def attention_seconds(device: Device, features: np.ndarray, itemsize: int, causal: bool, backward: bool) -> np.ndarray:
    """Seconds of attention over [heads of all sequences, rows, columns, width], forward or backward."""
    engine = _engine(device)
    heads, rows, columns, width = features.T
    if engine.fused_attention:
        pace = device.peak("bfloat16") * engine.pace(device.name).attention
        once = 4 * heads * rows * columns * width * (0.5 if causal else 1.0) / pace
        return 2.5 * once / FUSED_BACKWARD + 2 * FLOOR if backward else once + FLOOR
    scores, lines = heads * rows * columns * itemsize, heads * rows * width * itemsize
    inner = product_seconds(device, np.stack([rows, columns, width, heads], axis=1))
    outer = product_seconds(device, np.stack([rows, width, columns, heads], axis=1))
    products = 2 * inner + 2 * outer if backward else inner + outer
    passed = [3 * scores, 4 * lines] if backward else [2 * scores, 2 * lines]
    if engine.dropout:  # reads, writes and keeps a byte for each
        passed.append((2 + 1 / itemsize) * scores)
    return products + sum(moved_seconds(device, amount) for amount in passed)


def engine_seconds(work: Work, device: Device) -> np.ndarray | None:
    """Seconds of one kernel, for every split; none where the engine says nothing of its kind."""
    family, step = work.curve.split("/")
    dense = family in ("matmul", "bmm") or family.startswith("attention")
    if family in KEPT_APART or device.kind != "cuda" or (dense and work.dtype not in HALVES):
        return None
    if family in ("matmul", "bmm"):
        return product_seconds(device, work.features)
    if dense:
        causal = family == "attention_causal"
        return attention_seconds(device, work.features, DTYPE_BYTES[work.dtype], causal, step == "backward")
    return moved_seconds(device, work.bytes * _engine(device).pointwise)
