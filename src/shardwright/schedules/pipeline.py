"""What a pipeline has to do: stages on devices, the seconds and the memory of their passes, the hops between them.

Stages form a directed acyclic graph, usually a chain: a forward needs the forwards of the stages it reads from, the
gradient of an input needs the gradients of the stages that read its outputs (on a stage nobody reads: only its own
forward), a weight's gradient needs the input's. Between devices a result arrives ``hop`` seconds after it was
computed; a hop occupies nobody. Memory follows the rule of the published zero-bubble schedulers: a pass changes the
memory of its device when it is begun, and after no pass may more be held than the device's limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isnan

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import ProblemError
from shardwright.schedules.schedule import check_size

Floats = NDArray[np.float64]
PerStage = float | Sequence[float] | Sequence[Sequence[float]] | Floats
"""One figure for all, one per stage, or a table [stage][micro-batch]."""

LARGEST = 1e15
"""Seconds or units of memory of one pass: sums of a schedule's passes stay exact enough to be compared."""


@dataclass(frozen=True)
class Edge:
    """Stage ``reader`` reads what stage ``source`` computes; both ways the result is on its way for ``hop`` seconds."""

    source: int
    reader: int
    hop: float = 0.0


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages, their devices and micro-batches, with tables [stage, micro-batch] of seconds and of changes in memory.

    Build one with ``pipeline``; ``limits`` are the devices' memory.
    """

    device_of: tuple[int, ...]
    edges: tuple[Edge, ...]
    forward: Floats
    inputs: Floats
    weights: Floats
    forward_memory: Floats
    inputs_memory: Floats
    weights_memory: Floats
    limits: tuple[float, ...]

    @property
    def stages(self) -> int:
        return len(self.device_of)

    @property
    def devices(self) -> int:
        return len(self.limits)

    @property
    def microbatches(self) -> int:
        return int(self.forward.shape[1])

    def stages_of(self, device: int) -> tuple[int, ...]:
        return tuple(stage for stage, where in enumerate(self.device_of) if where == device)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds of computation of every device."""
        whole = (self.forward + self.inputs + self.weights).sum(axis=1)
        return tuple(float(sum(whole[stage] for stage in self.stages_of(device))) for device in range(self.devices))

    def reads(self, stage: int) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.reader == stage)

    def read_by(self, stage: int) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.source == stage)


def pipeline(
    device_of: Sequence[int],
    microbatches: int,
    forward: PerStage = 1.0,
    inputs: PerStage = 1.0,
    weights: PerStage = 1.0,
    hop: float | Sequence[float] = 0.0,
    forward_memory: PerStage = 1.0,
    inputs_memory: PerStage = 0.0,
    weights_memory: PerStage | None = None,
    limits: float | Sequence[float] = inf,
    sizes: Sequence[float] | None = None,
    edges: Sequence[Edge] | None = None,
) -> Pipeline:
    """State a pipeline; figures may be one for all, one per stage, or tables [stage][micro-batch].

    ``sizes`` scales seconds and memory of unequal micro-batches (1.0 is a usual one). ``hop`` is paid between
    neighbours of the chain on different devices; other wirings are given as ``edges``. Weights free what forward and
    inputs left unless said otherwise.

    >>> p = pipeline((0, 1), 4, forward=[1.0, 2.0], hop=0.1, sizes=[1, 1, 1, 0.5])
    >>> p.work, p.forward[1].tolist()
    ((10.5, 14.0), [2.0, 2.0, 2.0, 1.0])
    """
    stages = len(device_of)
    check_size(stages, microbatches)
    devices = max(device_of) + 1
    if set(device_of) != set(range(devices)):
        raise ProblemError(f"devices {sorted(set(device_of))} are not numbered 0, 1, 2, ….", "Leave no device out.")
    scale = np.ones(microbatches) if sizes is None else np.asarray(sizes, float)
    if scale.shape != (microbatches,):
        raise ProblemError(f"{scale.size} sizes for {microbatches} micro-batches.", "Give one per micro-batch.")

    def table(what: str, values: PerStage) -> Floats:
        given = np.asarray(values, float)
        if given.shape not in ((), (stages,), (stages, microbatches)):
            raise ProblemError(
                f"{what} has the shape {given.shape} for {stages} stages and {microbatches} micro-batches.",
                "Give one figure, one per stage, or a table [stage][micro-batch].",
            )
        rows = given[:, None] if given.ndim == 1 else given
        return np.broadcast_to(rows, (stages, microbatches)) * (scale if given.ndim < 2 else 1.0)

    seconds = [table(*pair) for pair in (("forward", forward), ("inputs", inputs), ("weights", weights))]
    for what, values in zip(("forward", "inputs", "weights"), seconds, strict=True):
        if not ((values >= 0) & (values <= LARGEST)).all():
            raise ProblemError(
                f"{what} takes {_odd(values):g} seconds somewhere.", f"Times are between 0 and {LARGEST:g}."
            )
    held, freed = table("forward_memory", forward_memory), table("inputs_memory", inputs_memory)
    rest = -(held + freed) if weights_memory is None else table("weights_memory", weights_memory)
    for values in (held, -freed, -rest):
        if not (np.abs(values) <= LARGEST).all():
            raise ProblemError(f"a pass changes memory by {_odd(values):g}.", f"Say at most {LARGEST:g}.")
    if (held < 0).any() or (freed > 0).any() or (rest > 0).any():
        raise ProblemError("a forward pass frees memory, or a backward pass takes some.", "Forward ≥ 0, backward ≤ 0.")
    caps = tuple(_each("limits", limits, devices))
    if any(isnan(cap) for cap in caps):
        raise ProblemError("a limit of memory is not a number.", "Give a number, or inf for none.")
    if edges is None:
        edges = [Edge(s, s + 1, delay) for s, delay in enumerate(_each("hop", hop, stages - 1))]
    wired = tuple(
        Edge(edge.source, edge.reader, 0.0 if device_of[edge.source] == device_of[edge.reader] else edge.hop)
        for edge in edges
    )
    for edge in wired:
        if not 0 <= edge.source < edge.reader < stages or not 0 <= edge.hop <= LARGEST:
            raise ProblemError(
                f"{edge} cannot be.",
                f"Edges lead to later stages below {stages}; hops are between 0 and {LARGEST:g} seconds.",
            )
    ahead, inner, after = seconds
    return Pipeline(tuple(device_of), wired, ahead, inner, after, held, freed, rest, caps)


def _odd(values: Floats) -> float:
    """The figure that cannot be, for an error: the one that is no number, or the furthest out."""
    return float(values.min() if values.min() < 0 or isnan(values.min()) else values.max())


def _each(what: str, values: float | Sequence[float], count: int) -> list[float]:
    """One figure for all, or one for each of ``count``."""
    given = np.asarray(values, float)
    if given.shape not in ((), (count,)):
        raise ProblemError(f"{what} has {given.size} figures where {count} are needed.", f"Give one figure or {count}.")
    return np.broadcast_to(given, (count,)).tolist()
