"""The memory that a matrix-product library holds for good (``aten/src/ATen/cuda/CublasHandlePool.cpp`` in PyTorch)."""

from __future__ import annotations

from shardwright.cluster import Device

KiB, MiB = 1 << 10, 1 << 20
_LARGE_WORKSPACES = ("H100", "H200", "H800", "H20", "B100", "B200", "B300")


def workspace(device: Device, training: bool = True) -> int:
    """Bytes the matrix-product library holds for good once a step has run.

    Every thread that multiplies owns a handle with its workspace, and the backward pass runs in a thread of its own.
    """
    if device.kind != "cuda":
        return 0
    one = 32 * MiB if any(name in device.name for name in _LARGE_WORKSPACES) else 8 * MiB + 128 * KiB
    return 2 * one if training else one
