"""From an operator on local shapes to the kernels it runs as, forward and backward.

Dense kernels are described in :mod:`~shardwright.costs.kernels_dense`, those bound by memory in
:mod:`~shardwright.costs.kernels_memory`; any operator that is not a product, contraction, convolution, attention or
recurrence moves its inputs and outputs through memory.
"""

from __future__ import annotations

from shardwright.costs import kernels_dense as dense
from shardwright.costs.kernels_memory import LocalOp, Work, base_name, memory_kernels

__all__ = ["LocalOp", "Work", "base_name", "kernels"]


def kernels(local: LocalOp, copies: str = "") -> tuple[list[Work], list[Work]]:
    """The kernels of an operator's forward and backward pass. ``copies``: how a view copies, where it must."""
    if local.name in dense.MATMUL and len(local.inputs) > max(dense.MATMUL[local.name]):
        return dense.matmul(local)
    if local.name == "einsum" and len(local.inputs) > 1:
        return dense.einsum(local)
    if local.name.startswith("conv") and len(local.inputs) > 1 and len(local.inputs[1].shape) > 2:
        return dense.convolution(local)
    if local.name == "scaled_dot_product_attention":
        return dense.attention(local)
    if local.name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return dense.recurrent(local)
    return memory_kernels(local, copies)
