"""Training engines other than ours, as data: which kernels they run, in which precision they sum gradients, what overlaps.

A profile says what an engine does (from its code or its documentation) and at what pace its kernels and its host run on a
kind of device (fitted to published runs of that engine; every file says to which). Prices *as that engine runs it* are made
of such a profile and of what was measured of the device's primitives (:mod:`shardwright.cluster.primitives`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from shardwright.cluster import toml_text
from shardwright.errors import ClusterError
from shardwright.files import read_text

_FOLDER = resources.files("shardwright.cluster") / "engines"
AHEAD = 3.6
"""Power of the mean by which the longer of a block's host and device seconds decides where launches are asynchronous."""


@dataclass(frozen=True)
class Pace:
    """How near an engine's kernels come to a kind of device: ``products`` over the table of products (that was measured on
    single ones, cool), ``memory`` over the datasheet's bandwidth, ``attention`` (where it is fused) over the peak flops."""

    products: float
    memory: float
    attention: float


@dataclass(frozen=True)
class Engine:
    """One engine of a time. ``pointwise``: bytes that its pointwise kernels move over those of fully fused ones.

    ``accumulation`` and ``reduction`` are bytes of a gradient's number where micro-batches are added up and where replicas
    are summed. ``state`` are bytes of a parameter's optimizer state (sharded by ZeRO), ``held`` of what every rank keeps
    whole under ZeRO-1. ``forward_issue`` and ``backward_issue`` are the host's seconds per kernel, ``meeting`` what a
    collective of tensor parallelism takes more per further rank. ``contention`` is the share of a collective's seconds that
    computation under it loses, ``network`` the share of its rate that collectives between nodes reach, ``hop`` their
    seconds per rank. ``selective`` says what selective recomputation computes again: ``attention``, or ``every other
    product`` and all that is cheap; ``sequence_parallel``: with it, what stands between products is cut along the sequence.
    ``sending`` is what a rank waits with each value that it sends to another stage, ``microbatch`` what the host adds to a
    micro-batch.
    """

    name: str
    source: str
    fitted: str
    paces: tuple[tuple[str, Pace], ...]
    fused_attention: bool
    dropout: bool
    pointwise: float
    accumulation: float
    reduction: float
    state: float
    held: float
    overlap: bool
    blocking: bool
    sequence_parallel: bool
    selective: str
    forward_issue: float
    backward_issue: float
    meeting: float = 0.0
    contention: float = 0.0
    network: float = 1.0
    hop: float = 0.0
    sending: float = 0.0
    microbatch: float = 0.0

    def pace(self, device: str) -> Pace:
        """The engine's pace on a kind of device; on one where no run of it was published, that of its nearest kind."""
        known = dict(self.paces)
        kind = device.split("-")[0]
        near = {"H200": "H100", "H800": "H100", "B200": "H100"}.get(kind, kind)
        if near not in known:
            raise ClusterError(
                f"no run of the engine {self.name!r} on {device} was published.",
                f"It has prices on {', '.join(known)}.",
            )
        return known[near]

    def together(self, device: float, host: float) -> float:
        """Seconds of a block whose kernels take ``device`` and whose launches take the host so long."""
        return device + host if self.blocking else (device**AHEAD + host**AHEAD) ** (1 / AHEAD)


def engine_names() -> list[str]:
    """The engines there are profiles of.

    >>> "megatron-2021" in engine_names()
    True
    """
    return sorted(path.stem for path in Path(str(_FOLDER)).glob("*.toml"))


@cache
def engine(name: str) -> Engine:
    """An engine's profile."""
    if name not in engine_names():
        raise ClusterError(f"there is no profile of an engine {name!r}.", f"Choose one of {', '.join(engine_names())}.")
    data = toml_text.loads(read_text(Path(str(_FOLDER / f"{name}.toml")), ClusterError))
    paces = tuple((device, Pace(**table)) for device, table in data.pop("pace").items())
    return Engine(name=name, paces=paces, **data)
