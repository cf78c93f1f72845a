"""The placement problem: a DAG of operators, the kinds of devices they may run on, and what a placement is.

The model is that of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020), widened to any
number of device kinds: per-kind times (infinite where unsupported), memory, co-location classes, forward and backward
nodes, and transfer costs that belong to the sending node and are paid once per (node, device, direction). A placement
gives every node a stage and every stage its devices: one device normally, several where the stage is replicated; several
stages may share a device when latency is the goal. Times may be in any unit; answers are in the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.errors import ProblemError

MOST_DEVICES = 100_000
"""Of one kind; more is a slip of the pen."""
FloatArray = np.ndarray
IntArray = np.ndarray


@dataclass(frozen=True)
class DeviceKind:
    """``count`` equal devices with ``memory`` bytes each.

    A ``host`` kind (a CPU) owns the memory the accelerators transfer from and to: it pays no transfers, its memory is
    not limited, and for latency its devices are pooled. ``transfer_factor`` scales transfer costs on other kinds.
    """

    name: str
    count: int
    memory: float = float("inf")
    host: bool = False
    transfer_factor: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.count <= MOST_DEVICES and self.memory >= 0 and self.transfer_factor >= 0):
            raise ProblemError(
                f"device kind {self.name!r} has count {self.count}, memory {self.memory}, "
                f"transfer factor {self.transfer_factor}.",
                f"Counts (at most {MOST_DEVICES}), memory and factors cannot be negative.",
            )

    @property
    def pays(self) -> float:
        """What a transfer of cost 1 costs a device of this kind."""
        return 0.0 if self.host else self.transfer_factor

    @property
    def room(self) -> float:
        """Bytes one device may hold: no limit on a host."""
        return float("inf") if self.host else self.memory


@dataclass(frozen=True, eq=False)
class Workload:
    """What has to be placed. Row ``i`` of every array is node ``i``.

    >>> import numpy as np
    >>> chain = Workload(
    ...     kinds=(DeviceKind("accelerator", 2),), times=np.array([[1.0], [2.0]]), memory=np.zeros(2),
    ...     transfer=np.array([0.5, 0.0]), edges=np.array([[0, 1]]))
    >>> chain.nodes, chain.devices
    (2, 2)
    """

    kinds: tuple[DeviceKind, ...]
    times: FloatArray  # [nodes, kinds]; infinite where the node cannot run there
    memory: FloatArray  # [nodes] bytes
    transfer: FloatArray  # [nodes] cost of moving the node's output over one device's link, once
    edges: IntArray  # [edges, 2] source, destination
    backward: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [nodes]
    classes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [nodes] same number: same device
    names: tuple[str, ...] = ()
    parameter_bytes: FloatArray = field(default_factory=lambda: np.zeros(0))  # [nodes] synchronised between replicas
    sync_bandwidth: float = float("inf")  # bytes per unit of time, for replicas of a stage

    def __post_init__(self) -> None:
        n = len(self.memory)
        fill = {
            "times": np.asarray(self.times, dtype=np.float64).reshape(n, -1),
            "memory": np.asarray(self.memory, dtype=np.float64),
            "transfer": np.asarray(self.transfer, dtype=np.float64),
            "edges": np.asarray(self.edges, dtype=np.int64).reshape(-1, 2),
            "backward": np.asarray(self.backward, dtype=bool) if len(self.backward) else np.zeros(n, dtype=bool),
            "classes": _dense(self.classes) if len(self.classes) else np.arange(n, dtype=np.int64),
            "parameter_bytes": np.asarray(self.parameter_bytes, dtype=np.float64)
            if len(self.parameter_bytes)
            else np.zeros(n),
        }
        for name, value in fill.items():
            object.__setattr__(self, name, value)
        self._check(n)

    def _check(self, n: int) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("transfer", "backward", "classes", "parameter_bytes")}
        wrong = {name: length for name, length in lengths.items() if length != n}
        if wrong or self.times.shape != (n, len(self.kinds)):
            raise ProblemError(
                f"arrays disagree about the {n} nodes: {wrong or {'times': self.times.shape}}.",
                "Give every per-node array one row per node (and times one column per device kind).",
            )
        if len(self.edges) and (self.edges.min() < 0 or self.edges.max() >= n):
            raise ProblemError(f"an edge names a node outside 0..{n - 1}.", "Check the ids of the edges.")
        amounts = (self.transfer, self.memory, self.parameter_bytes)
        if not (self.times >= 0).all() or any(not (np.isfinite(a) & (a >= 0)).all() for a in amounts):
            raise ProblemError(
                "a time, transfer cost or size is negative or not a number.", "Check the input's numbers."
            )
        homeless = np.flatnonzero(~np.isfinite(self.times[:, [k.count > 0 for k in self.kinds]]).any(axis=1))
        if len(homeless):
            raise ProblemError(
                f"node {self.label(int(homeless[0]))} runs on none of the available device kinds.",
                "Add a device kind that supports it.",
            )

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.memory)

    @property
    def devices(self) -> int:
        """How many devices there are, over all kinds."""
        return sum(kind.count for kind in self.kinds)

    def label(self, node: int) -> str:
        """The node's name, or its number where it has none."""
        return self.names[node] if self.names else str(node)


@dataclass(frozen=True)
class Stage:
    """Where one stage runs: the numbers of its devices among those of its kind (several: replicated, or pooled)."""

    kind: int
    devices: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Placement:
    """The stage of every node, and the devices of every stage."""

    stage_of: IntArray
    stages: tuple[Stage, ...]

    def members(self, stage: int) -> IntArray:
        """The nodes of one stage."""
        return np.flatnonzero(self.stage_of == stage)


@dataclass(frozen=True)
class Rules:
    """How a stage's load is counted, and what a solver may do.

    ``overlap``: transfers run beside the computation, both directions of a link at once, instead of before and after it:
    the load is the largest of computing, receiving and sending.
    ``replicate``: a stage may run on several devices of one kind, each taking every m-th sample.
    ``separate_passes``: minimise the largest forward load plus the largest backward load instead of the largest sum.
    """

    overlap: bool = False
    replicate: bool = False
    separate_passes: bool = False


def one_stage_per_device(kinds: Sequence[DeviceKind]) -> tuple[Stage, ...]:
    """The stages of a placement that uses every device once, in the order of the kinds."""
    return tuple(Stage(k, (i,)) for k, kind in enumerate(kinds) for i in range(kind.count))


def _dense(classes: IntArray) -> IntArray:
    return np.unique(np.asarray(classes, dtype=np.int64), return_inverse=True)[1].astype(np.int64)
