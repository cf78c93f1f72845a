"""The plan: strategy, predicted cost and proof, tied by a fingerprint to the graph and the cluster it was made for.

A plan is a file (:mod:`shardwright.plans.serial`): readable, diffable, versioned, free of code. Loading one for another
model is an error that says what differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardwright.cluster import Cluster, Mesh, mesh_of
from shardwright.errors import PlanError
from shardwright.graph import Graph, fingerprint
from shardwright.operators.strategy import Strategy


@dataclass(frozen=True)
class Prediction:
    """What a strategy is expected to cost on its mesh. Seconds are per step, bytes per device."""

    step_seconds: float
    sum_seconds: float
    memory_bytes: float
    communication_bytes: float
    exposed_seconds: float
    fits: bool


@dataclass(frozen=True)
class Proof:
    """What the search knows about the optimum of the summed seconds: ``lower_bound`` holds within ``scope``."""

    cost: float
    lower_bound: float
    optimal: bool
    seconds: float
    scope: str

    @property
    def gap(self) -> float:
        return 0.0 if self.optimal or not self.cost else (self.cost - self.lower_bound) / self.cost


@dataclass(frozen=True)
class Candidate:
    """A strategy under a name, as the comparison table shows it."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    prediction: Prediction | None
    note: str = ""


@dataclass(frozen=True)
class Signature:
    """What identifies the model a plan was made for, in words a person can compare."""

    fingerprint: str
    operators: int
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    training: bool

    @staticmethod
    def of(graph: Graph) -> Signature:
        tensors = graph.tensors
        return Signature(
            fingerprint(graph),
            len(graph.ops),
            tuple((p.paths[0], tensors[p.tensor].dtype, tensors[p.tensor].shape) for p in graph.parameters),
            tuple((i.path, tensors[i.tensor].dtype, tensors[i.tensor].shape) for i in graph.inputs if i.tensor),
            graph.training,
        )

    def difference(self, other: Signature) -> str:
        """The first thing that differs, as a clause."""
        if self.training != other.training:
            return f"the plan is for {_mode(self.training)}, the model is in {_mode(other.training)} mode"
        for what, mine, theirs in (
            ("input", self.inputs, other.inputs),
            ("parameter", self.parameters, other.parameters),
        ):
            mine_by, theirs_by = {m[0]: m[1:] for m in mine}, {t[0]: t[1:] for t in theirs}
            for name in [*mine_by, *theirs_by]:
                a, b = mine_by.get(name), theirs_by.get(name)
                if a != b:
                    return f"{what} {name} is {_described(a)} in the plan and {_described(b)} in the model"
        if self.operators != other.operators:
            return f"the plan knows {self.operators} operators, the model has {other.operators}"
        return "an operator or one of its arguments differs (same parameters, same inputs)"


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _described(entry: tuple | None) -> str:
    return "absent" if entry is None else f"{entry[0]}{list(entry[1])}"


@dataclass(frozen=True)
class Asked:
    """What a user insisted on: bytes per device, pins and prohibitions (:mod:`shardwright.search.constraints`)."""

    memory_limit: float | None = None
    pins: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A strategy for one model on one cluster, with its price and its proof.

    ``model`` is the reference the plan was made from (``gpt:layers=12``), empty when it came from Python objects.
    ``replicated`` lists operators that run whole for want of a rule, with the seconds that costs.
    """

    model: str
    signature: Signature
    cluster: Cluster
    strategy: Strategy
    search: str
    optimiser: str
    prediction: Prediction
    proof: Proof
    calibration: str
    candidates: tuple[Candidate, ...] = ()
    replicated: tuple[tuple[str, str, float], ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)
    asked: Asked = Asked()
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None

    @property
    def mesh(self) -> Mesh:
        """The priced mesh of the plan's cluster with the strategy's axes."""
        return mesh_of(self.cluster, self.strategy.sizes)

    def check(self, graph: Graph) -> None:
        """Refuse a graph that is not the one this plan was made for, saying what differs."""
        actual = Signature.of(graph)
        if actual.fingerprint != self.signature.fingerprint:
            raise PlanError(
                f"This plan was made for another model: {self.signature.difference(actual)}.",
                "Plan again for this model and these inputs, or load the plan that belongs to them.",
            )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        from shardwright.plans.serial import to_json

        Path(path).write_text(to_json(self))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan written by :meth:`save`."""
        from shardwright.plans.serial import from_json

        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"Cannot read the plan {str(path)!r}: {error}.", "Check the path.") from None
        return from_json(text, str(path))
