"""What a search found, as a proposal for a plan: the same record whoever searched, on one mesh or in stages.

A proposal knows what its search takes it to cost and what no step of it undercuts; which operators, ranks and splits it
means is laid out when somebody wants to know (:meth:`Proposal.laid`). It is judged by simulating it
(:mod:`shardwright.planner.judging`): then it has a prediction, or the reason why it cannot be run. Rows of the comparison
come from proposals (:meth:`Proposal.row`), and so does the plan (:mod:`shardwright.planner.delivering`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.plans import Candidate, Plan, Prediction, Proof, Stage
from shardwright.plans.stages import one_pass
from shardwright.schedules import Schedule

Shape = tuple[tuple[str, int], ...]

UNPROVED = Proof()


class Laid(NamedTuple):
    """A proposal in full: its stages and the order of their passes."""

    stages: tuple[Stage, ...]
    schedule: Schedule


def on_one_mesh(graph: Graph, strategy: Strategy) -> Laid:
    """All operators on one mesh, the batch in one go."""
    return Laid((Stage.of(graph, strategy),), one_pass(graph.training))


@dataclass(frozen=True, eq=False, kw_only=True)
class Proposal(ABC):
    """What a search found under a ``name``.

    ``shape`` is its mesh, or its stages and micro-batches, as tables show them. ``expected`` are the sums that the search
    goes by. A step takes about ``unhidden`` seconds at least, were all traffic of parameters hidden, and never fewer than
    ``bound``. ``proof`` is what its search proved of all that it could have found. ``prediction`` is what simulating said of
    it; ``refusal`` why it cannot be run.
    """

    name: str
    shape: Shape
    expected: Prediction
    unhidden: float = 0.0
    bound: float = 0.0
    proof: Proof = UNPROVED
    notes: tuple[str, ...] = ()
    prediction: Prediction | None = None
    refusal: ShardwrightError | None = None
    plan: Plan | None = None
    """The plan that was made to simulate it, where one was."""

    @abstractmethod
    def laid(self) -> Laid:
        """The proposal in full.

        Raises
        ------
        LoweringError
            When it turns out then that the runtime could not run it.
        """

    @property
    def fits(self) -> bool:
        """Whether it was simulated and there is room for it."""
        return self.prediction is not None and self.prediction.fits

    @property
    def seconds(self) -> float:
        """Simulated seconds of a step; infinite for what cannot be run or was not simulated."""
        return inf if self.prediction is None else self.prediction.step_seconds

    @property
    def sum_seconds(self) -> float:
        """Seconds of all that one device does in a step, summed: priced, or by the search's own sums."""
        return (self.prediction or self.expected).sum_seconds

    @property
    def memory_bytes(self) -> float:
        """What a device needs: simulated, or by the search's own count."""
        return (self.prediction or self.expected).memory_bytes

    def row(self, name: str = "") -> Candidate:
        """Its row in the comparison, simulated if it was, by the search's sums otherwise."""
        if self.refusal is not None:
            return Candidate(name or self.name, self.shape, None, self.refusal.message)
        told = self.prediction or self.expected
        return Candidate(name or self.name, self.shape, told, self.note, simulated=self.prediction is not None)

    @property
    def note(self) -> str:
        """What a row says beside its numbers."""
        return ""


@dataclass(frozen=True, eq=False, kw_only=True)
class LaidOut(Proposal):
    """A proposal whose stages are known from the start."""

    layout: Laid

    def laid(self) -> Laid:
        return self.layout
