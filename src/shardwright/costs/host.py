"""The host's seconds to issue an operator.

Kernels run in the order in which the host issues them, so a step of many small operators takes as long as the host needs
(the simulator lets no event start before it is issued). Calibration times the common operators where they stand in a model,
among others, with every gradient wanted (:class:`shardwright.cluster.pace.Yardstick`). Here the gradients that are really
wanted are counted. An operator that was not timed, or a piece computed with several small ones (statistics of a cut norm),
is what autograd reports of it on tensors without data: so many kernels, views and backward functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from shardwright.cluster import Device
from shardwright.graph.core import Op, Tensor
from shardwright.operators.record import HostClass, measured_name, record
from shardwright.operators.work import does_nothing

Issued = tuple[int, int, int, int]
"""Kernels and views of the forward pass, functions and kernels of the backward pass."""

UNKNOWN: Issued = (1, 0, 1, 1)
"""What an operator that could not be looked at is taken for."""


def dispatch_seconds(op: Op, tensors: Mapping[str, Tensor], issued: Issued, device: Device) -> tuple[float, float]:
    """The host's seconds to issue an operator's forward and backward kernels; calls of modules are not included."""
    table = {} if device.profile is None else device.profile.dispatch_of
    if not table:
        return device.launch_overhead, 2 * device.launch_overhead
    issued = issued if any(issued) else UNKNOWN
    inputs = [tensors[name] for name in op.inputs]
    output = next((tensors[name] for name in op.outputs if name is not None), None)
    if does_nothing(op, inputs, output):
        return 0.0, 0.0
    known = record(op.target).issued
    flat = known.flat and all(len(tensor.shape) <= 2 for tensor in inputs)
    name = known.flat if flat else known.like or measured_name(op.target)
    if name not in table:
        forward, backward = several_seconds(issued, device)
    elif known.turned:  # its operands are turned by views, then multiplied
        turned = several_seconds((issued[0] - 1, issued[1], 0, 0), device)[0]
        forward = table[name][0] + turned
        backward = table[name][1] + (issued[2] - 1) * table.get("view", (0.0, 0.0))[1]
    elif known.steps is not None:
        call, steps = table.get(f"{name}_call", (0.0, 0.0)), known.steps(op, inputs)
        forward, backward = (once + steps * each for once, each in zip(call, table[name], strict=True))
    else:
        forward, backward = table[name]
    return forward, _gradients(known, inputs, output, backward, table)


def modules_entered(ops: Iterable[Op]) -> dict[str, int]:
    """How many modules are called on the way to each operator: the parts of its path that the one before is not in.

    >>> from types import SimpleNamespace as O
    >>> modules_entered([O(name="a", module="blocks.0.up"), O(name="b", module="blocks.0.up"), O(name="c", module="norm")])
    {'a': 3, 'b': 0, 'c': 1}
    """
    entered: dict[str, int] = {}
    before: list[str] = []
    for op in ops:
        path = op.module.split(".") if op.module else []
        common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, before, strict=False))
        entered[op.name] = len(path) - sum(1 for _ in common)
        before = path
    return entered


def several_seconds(issued: Issued, device: Device) -> tuple[float, float]:
    """The same for small operators without a price of their own."""
    table = {} if device.profile is None else device.profile.dispatch_of
    kernel = table.get("mul", (device.launch_overhead, 2 * device.launch_overhead))
    view = table.get("view", (0.0, 0.0))
    kernels, views, functions, computed = issued
    if not kernels:
        return views * view[0], functions * view[1]
    # A product's backward pass is one function with one kernel, a view's is one without.
    return kernels * kernel[0] + views * view[0], functions * view[1] + computed * max(kernel[1] - view[1], 0.0)


def _gradients(
    known: HostClass,
    inputs: list[Tensor],
    output: Tensor | None,
    backward: float,
    table: Mapping[str, tuple[float, float]],
) -> float:
    """What the backward pass takes to issue, by the gradients that are wanted."""
    wanted = [tensor.grad for tensor in inputs]
    if not any(wanted):
        return 0.0
    if known.gradients:
        backward *= sum(wanted) / known.gradients
    if not known.sums:
        return backward
    broadcast = sum(t.grad and output is not None and t.elements < output.elements for t in inputs)
    return backward + table.get("sum", (0.0, 0.0))[0] * broadcast
