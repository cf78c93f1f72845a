"""The optimizer's step: its seconds and the bytes it keeps per parameter, dtype-aware.

An elementwise update is bound by memory: AdamW reads the parameter, its gradient and two moments and writes three of
them, momentum reads three and writes two, plain SGD reads two and writes one. States have the parameter's dtype, as
``torch.optim`` makes them; AdamW also keeps one float32 step counter per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cluster import Device
from shardwright.errors import ShardwrightError


@dataclass(frozen=True)
class Optimizer:
    """``states`` tensors kept per parameter, ``passes`` over its bytes in one step, ``scalars`` bytes per tensor."""

    name: str
    states: int
    passes: int
    scalars: int = 0


OPTIMIZERS = {
    "adamw": Optimizer("adamw", states=2, passes=7, scalars=4),
    "adam": Optimizer("adam", states=2, passes=7, scalars=4),
    "momentum": Optimizer("momentum", states=1, passes=5),
    "sgd": Optimizer("sgd", states=0, passes=3),
    "none": Optimizer("none", states=0, passes=0),
}


def optimizer(name: str) -> Optimizer:
    """Look an optimizer up by name.

    >>> optimizer("adamw").states
    2
    """
    try:
        return OPTIMIZERS[name.lower()]
    except KeyError:
        raise ShardwrightError(f"unknown optimizer {name!r}.", f"Choose one of {', '.join(OPTIMIZERS)}.") from None


def state_bytes(name: str, parameter_bytes: Sequence[int]) -> int:
    """Bytes of optimizer state for parameters (local shards) of these sizes.

    >>> state_bytes("adamw", [1000, 500])
    3008
    """
    kind = optimizer(name)
    return sum(kind.states * size + kind.scalars for size in parameter_bytes)


def step_seconds(
    name: str, parameter_bytes: Sequence[int], device: Device, dtype: str = "float32"
) -> tuple[float, float]:
    """Seconds of one optimizer step over these (local) parameters: on the device, and for the host to issue it."""
    kind = optimizer(name)
    if not parameter_bytes or not kind.passes:
        return 0.0, 0.0
    total = float(sum(parameter_bytes))
    fitted = None
    if device.profile is not None:
        rows = {row[0]: row[1:] for row in device.profile.optimizer}
        fitted = rows.get(f"{kind.name}/{dtype}", rows.get(f"{kind.name}/float32"))
        curve = device.profile.by_name.get(f"{kind.name}/{dtype}/update")
        if curve is not None:  # a CPU: one tensor after the other, each at the speed of its size
            sizes = np.maximum(np.array(parameter_bytes, dtype=float), 1.0)
            python = device.profile.dispatch_of.get("distributed_update", (0.0, 0.0))[0]
            return float((sizes / device.bandwidth * curve(sizes[:, None]) + python).sum()), 0.0
    if fitted is None:
        host = device.launch_overhead * (4 + 0.3 * len(parameter_bytes))
        return kind.passes * total / (0.75 * device.bandwidth) + device.launch_overhead, host
    base, per_tensor, per_byte = fitted
    return per_byte * total, base + per_tensor * len(parameter_bytes)
