"""The plan: strategy, predicted cost and proof, tied by a fingerprint to the graph and the cluster it was made for.

A plan is a file (:mod:`shardwright.plans.serial`): readable, diffable, versioned, free of code. Loading one for another
model is an error that says what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed.tensor import Shard

from shardwright.cluster import Cluster, Mesh, parse_cluster
from shardwright.errors import PlanError
from shardwright.files import read_text, write
from shardwright.graph import Graph, fingerprint
from shardwright.operators.strategy import Strategy
from shardwright.plans.proof import Proof
from shardwright.plans.stages import Stage, check_operators, check_stages, one_pass
from shardwright.schedules import Schedule
from shardwright.units import bytes_text, seconds_text


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
class Candidate:
    """A strategy under a name, as the comparison table shows it."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    prediction: Prediction | None
    note: str = ""
    simulated: bool = True
    """Otherwise its seconds and bytes are sums of its operators', and nobody knows whether it fits or can be run."""


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


OTHER_MODEL = "Plan again for this model and these inputs, or load the plan that belongs to them."


@dataclass(frozen=True)
class PlanRequest:
    """What a user insisted on: bytes per device, pins and prohibitions (:mod:`shardwright.search.constraints`)."""

    memory_limit: float | None = None
    pins: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Serving:
    """What a plan for inference was made for: seconds of one call (``latency``) or rows a second (``throughput``).

    ``cache`` are the positions that are in the cache already, ``calls`` how many calls of the given batch one step serves.
    """

    objective: str = "latency"
    cache: int = 0
    calls: int = 1


@dataclass(frozen=True, repr=False)
class Plan:
    """Stages of one model on one cluster and the order of their passes, with their price and its proof.

    One mesh is one stage that takes the batch in one go; gradient accumulation is one stage with several micro-batches.
    ``model`` is the reference the plan was made from (``gpt:layers=12``), empty when it came from Python objects.
    ``replicated`` lists operators that run whole for want of a rule, with the seconds that costs. ``captured`` is the graph
    it was made for, or the line of text that stands for it in the plan's file; ask :meth:`graph` for it. The schedule orders
    the passes of every group of ranks (:mod:`shardwright.schedules`).

    Raises
    ------
    PlanError
        When stages and schedule do not belong together; the message has what was found on both sides.
    """

    model: str
    signature: Signature
    cluster: Cluster
    stages: tuple[Stage, ...]
    schedule: Schedule
    search: str
    optimizer: str
    prediction: Prediction
    proof: Proof
    calibration: str
    candidates: tuple[Candidate, ...] = ()
    replicated: tuple[tuple[str, str, float], ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)
    asked: PlanRequest = PlanRequest()
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    captured: Graph | str | None = field(default=None, compare=False)  # the signature's fingerprint stands for it
    serving: Serving | None = None
    """Set for plans without a backward pass that were asked for as such."""
    batch_norm: str = "whole"
    """Whose statistics batch norms take: those of the whole batch, or ``per-piece``, those of every micro-batch."""
    also: tuple[Graph | str, ...] = field(default=(), compare=False)
    """Other calls that are prepared for; ask :meth:`other_graphs` for them."""

    def __post_init__(self) -> None:
        check_stages(self.stages, self.schedule)

    @staticmethod
    def of(
        graph: Graph,
        stages: Sequence[Stage] | Strategy,
        schedule: Schedule | None = None,
        *,
        search: str = "by hand",
        optimizer: str = "adamw",
        batch_norm: str = "whole",
    ) -> Plan:
        """A plan that nobody has priced, for processes of this machine; a strategy alone is one stage on all its ranks.
        Without a ``schedule`` the batch is taken in one go.

        >>> Plan.of(graph, strategy).devices == strategy.devices                                 # doctest: +SKIP
        True
        """
        chosen = (Stage.of(graph, stages),) if isinstance(stages, Strategy) else tuple(stages)
        workers = len({rank for stage in chosen for rank in stage.ranks})
        return Plan(
            model="",
            signature=Signature.of(graph),
            cluster=parse_cluster(f"local:{workers}"),
            stages=chosen,
            schedule=schedule or one_pass(graph.training),
            search=search,
            optimizer=optimizer,
            prediction=Prediction(0.0, 0.0, 0.0, 0.0, 0.0, True),
            proof=Proof(),
            calibration="",
            batch_norm=batch_norm,
        )

    def __repr__(self) -> str:
        """One line: what a plan is about. Everything it decides is in its fields, and in its file."""
        p = self.prediction
        return (
            f"<Plan of {self.model or 'a model'} ({self.signature.operators} operators) on {self.cluster.name}, "
            f"{self.shape}: {seconds_text(p.step_seconds)} a step, {bytes_text(p.memory_bytes)} a device>"
        )

    def graph(self, *, trusted: bool = False) -> Graph:
        """The captured graph the plan was made for, from the plan itself; no model is built and none of its code runs.

        A graph read from a file is refused where it calls more than PyTorch's own operators, unless it is ``trusted``.

        >>> Plan.load("plan.json").graph().ops[0]                                 # doctest: +SKIP
        """
        from shardwright.plans.packed import unpack

        if self.captured is None:
            raise PlanError(
                "The plan does not hold the graph of its model.",
                "Plan again with this version, or give the model: --model MODEL.",
            )
        found = self.captured if isinstance(self.captured, Graph) else unpack(self.captured, trusted=trusted)
        self.check(found)
        return found

    def other_graphs(self, *, trusted: bool = False) -> list[Graph]:
        """The graphs of the other calls that were prepared (``shardwright.plan(…, also=[…])``)."""
        from shardwright.plans.packed import unpack

        return [one if isinstance(one, Graph) else unpack(one, trusted=trusted) for one in self.also]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have stages, in order."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))

    @property
    def devices(self) -> int:
        """How many processes run it."""
        return len(self.ranks)

    @property
    def microbatches(self) -> int:
        """Into how many the batch is cut."""
        return self.schedule.microbatches

    @property
    def whole(self) -> bool:
        """Whether the whole model is on one mesh of all ranks and takes the batch in one go."""
        first, *others = self.stages
        return not others and self.microbatches == 1 and first.ranks == tuple(range(len(first.ranks)))

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """Of every stage, the priced mesh of the plan's cluster with its strategy's axes."""
        return tuple(stage.mesh_of(self.cluster) for stage in self.stages)

    @property
    def shape(self) -> str:
        """Stages, micro-batches and meshes in a few words."""
        meshes = dict.fromkeys(
            " × ".join(f"{name} {size}" for name, size in stage.strategy.axes) for stage in self.stages
        )
        counts = [(len(self.stages), "stages"), (self.microbatches, "micro-batches")]
        several = [f"{count} {what}" for count, what in counts if count > 1]
        return ", ".join([*several, " or ".join(meshes)])

    def check_parameters(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuse a model without the plan's parameters, before it is captured (which may take many seconds).

        ``parameters`` are by every name they have. What a model has beyond those of the plan its graph may not read.

        >>> plan.check_parameters(model.named_parameters(remove_duplicate=False))                  # doctest: +SKIP
        """
        found = {name: (str(held.dtype).removeprefix("torch."), tuple(held.shape)) for name, held in parameters}
        for name, dtype, shape in self.signature.parameters:
            if found.get(name) != (dtype, shape):
                mine, theirs = _described((dtype, shape)), _described(found.get(name))
                raise PlanError(
                    f"This plan was made for another model: parameter {name} is {mine} in the plan and {theirs} in the "
                    "model.",
                    OTHER_MODEL,
                )

    def check(self, graph: Graph) -> None:
        """Refuse a graph that is not the one this plan was made for, saying what differs."""
        actual = Signature.of(graph)
        if actual.fingerprint != self.signature.fingerprint:
            raise PlanError(
                f"This plan was made for another model: {self.signature.difference(actual)}.",
                OTHER_MODEL,
            )
        self._check_names(graph)

    def _check_names(self, graph: Graph) -> None:
        """Stages have this graph's operators, each of them once, and no others; of one stage's strategy all names are."""
        check_operators(self.stages, graph)
        if len(self.stages) > 1 or self.microbatches > 1:
            return  # they speak of graphs that are cut first; whoever does that checks them
        strategy, tensors = self.stages[0].strategy, graph.tensors
        for what, mine, theirs in (
            ("split for the operator", set(strategy.splits), {op.name for op in graph.ops}),
            ("resting layout for", set(strategy.resting), set(graph.sources)),
        ):
            if mine != theirs:
                name = min(mine ^ theirs)
                has, knows = ("has", "does not have it") if name in mine else ("lacks", "has it")
                raise PlanError(f"The plan {has} a {what} {name!r}; its model {knows}.", "Plan again.")
        for name, layout in [*strategy.resting.items(), *strategy.kept.items()]:
            if name not in tensors:
                raise PlanError(f"The plan keeps a layout for {name!r}, which its model does not have.", "Plan again.")
            if any(isinstance(p, Shard) and p.dim >= len(tensors[name].shape) for p in layout):
                raise PlanError(f"The plan cuts {name!r} along a dim that it does not have.", "Plan again.")

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from importlib import import_module  # reports come after plans: a notebook asks for them, plans do not

        html: str = import_module("shardwright.reports.summary").notebook_html(self)
        return html

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        from shardwright.plans.serial import to_json

        write(path, to_json(self))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan written by :meth:`save`."""
        from shardwright.plans.serial import from_json

        return from_json(read_text(path, PlanError), repr(str(path)))
