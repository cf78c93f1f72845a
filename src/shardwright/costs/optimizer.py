"""The optimizer's step: its seconds and the bytes it keeps per parameter, dtype-aware.

An elementwise update is bound by memory: AdamW reads the parameter, its gradient and two moments and writes three of
them, momentum reads three and writes two, plain SGD reads two and writes one. States have the parameter's dtype, as
``torch.optim`` makes them; AdamW also keeps one float32 step counter per tensor. ``adamw-float32`` is AdamW in mixed
precision: a model that computes in half precision (``parallelize(..., compute_dtype=torch.bfloat16)``), whose parameters,
gradients and states are float32 where the optimizer sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cluster import Device
from shardwright.errors import ShardwrightError
from shardwright.graph.core import DTYPE_BYTES

FLOAT32 = DTYPE_BYTES["float32"]


@dataclass(frozen=True)
class Optimizer:
    """``states`` tensors kept per parameter, ``passes`` over its bytes in one step, ``scalars`` bytes per tensor;
    ``masters``: all of it in float32 beside the parameters that are computed with."""

    name: str
    states: int
    passes: int
    scalars: int = 0
    masters: bool = False

    def kept(self, computed: int, dtype: str) -> int:
        """Bytes of one tensor in the dtype the optimizer works in; ``computed`` are those in the dtype of the model.

        >>> optimizer("adamw-float32").kept(100, "bfloat16"), optimizer("adamw").kept(100, "bfloat16")
        (200, 100)
        """
        return computed * FLOAT32 // min(DTYPE_BYTES[dtype], FLOAT32) if self.masters else computed

    def beside(self, computed: int, dtype: str) -> int:
        """Bytes that a parameter has beside those it is computed with: its float32 self, where it is not that already."""
        kept = self.kept(computed, dtype)
        return kept if kept != computed else 0


OPTIMIZERS = {
    "adamw": Optimizer("adamw", states=2, passes=7, scalars=4),
    "adamw-float32": Optimizer("adamw", states=2, passes=7, scalars=4, masters=True),
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


def state_bytes(name: str, parameter_bytes: Sequence[int], dtype: str = "float32") -> int:
    """Bytes of optimizer state for parameters (local shards) of these sizes, float32 parameters of mixed precision included.

    >>> state_bytes("adamw", [1000, 500]), state_bytes("adamw-float32", [1000, 500], "bfloat16")
    (3008, 9008)
    """
    kind = optimizer(name)
    sizes = ((kind.kept(size, dtype), kind.beside(size, dtype)) for size in parameter_bytes)
    return sum(kind.states * kept + beside + kind.scalars for kept, beside in sizes)


def step_seconds(
    name: str, parameter_bytes: Sequence[int], device: Device, dtype: str = "float32"
) -> tuple[float, float]:
    """Seconds of one optimizer step over these (local) parameters: on the device, and for the host to issue it."""
    kind = optimizer(name)
    if not parameter_bytes or not kind.passes:
        return 0.0, 0.0
    if kind.masters:
        parameter_bytes, dtype = [kind.kept(size, dtype) for size in parameter_bytes], "float32"
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
