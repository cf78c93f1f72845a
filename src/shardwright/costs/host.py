"""The host's seconds to issue an operator.

Kernels run in the order in which the host issues them, so a step of many small operators takes as long as the host needs
(the simulator lets no event start before it is issued). Calibration times the dispatch of each kind of operator on the
machine. Its backward passes ask for the gradient of one input; a product or a convolution runs one kernel for each
gradient that is wanted, and a bias one sum, so these are counted here. Where a rank computes its piece of an operator with
several others (statistics of a cut norm), each of those is issued.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.cluster import Device
from shardwright.costs.kernels_memory import SAME_KERNEL, base_name
from shardwright.graph.core import Op, Tensor

PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "einsum"))
CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d", "convolution"))
"""Operators with a kernel of their own for the gradient of each of two factors."""


def dispatch_seconds(
    op: Op, tensors: Mapping[str, Tensor], device: Device, training: bool = True
) -> tuple[float, float]:
    """The host's seconds to issue an operator's forward and backward kernels, the call of its module included."""
    if device.profile is None or not device.profile.dispatch:
        return device.launch_overhead, 2 * device.launch_overhead if training else 0.0
    table = device.profile.dispatch_of
    name = base_name(op.target)
    typical = table.get("*", (device.launch_overhead, 2 * device.launch_overhead))  # the median of those measured
    forward, backward = table.get(name, table.get(SAME_KERNEL.get(name, "*"), typical))
    forward += table.get("module", (0.0, 0.0))[0]
    if not training:
        return forward, 0.0
    factors, sums = _gradients(name, op, tensors)
    return forward, backward * max(factors, 1) + device.launch_overhead * sums


def several_seconds(issued: tuple[int, int, int], device: Device, training: bool = True) -> tuple[float, float]:
    """The same for ``issued`` kernels, views and backward functions of small operators that stand for one."""
    table = {} if device.profile is None else device.profile.dispatch_of
    add = table.get("add", (device.launch_overhead, 2 * device.launch_overhead))
    view = table.get("view", (0.0, 0.0))
    kernels, views, functions = issued
    return kernels * add[0] + views * view[0], functions * add[1] if training else 0.0


def _gradients(name: str, op: Op, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many factors want a gradient, and how many further inputs one that is summed up (a bias)."""
    if name not in PRODUCTS and name not in CONVOLUTIONS:
        return 1, 0
    wanted = [each for each in op.inputs if tensors[each].grad]
    bias = tensors[op.inputs[0 if name in ("addmm", "baddbmm", "addmv") else -1]] if len(op.inputs) == 3 else None
    summed = int(bias is not None and bias.grad)
    return min(len(wanted) - summed, 2), summed
