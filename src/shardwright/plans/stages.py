"""The stages of a plan: each has operators of the captured graph, ranks of its own, a mesh and a strategy on it.

The schedule (:mod:`shardwright.schedules`) orders the passes of every device, a *device* of the schedule being the ranks of
one mesh. Stages are numbered so that values flow from lower to higher numbers. One mesh is one stage that takes the batch in
one go, gradient accumulation one stage with several micro-batches. The strategy of a stage speaks of the operators of its
own graph (:func:`shardwright.program.stages.stage_graphs`), which are those of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardwright.cluster import Cluster, Mesh, mesh_of, part_of
from shardwright.errors import PlanError, ProblemError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.plans.layouts import (
    NestText,
    RouteText,
    decisions_from,
    layout_from,
    layout_text,
    nests_text,
    routes_text,
)
from shardwright.program import FixedDecisions, Sizes
from shardwright.records import shown
from shardwright.schedules import Schedule

AGAIN = "Plan again."


def one_pass(training: bool) -> Schedule:
    """One stage, the batch in one go: a forward pass and, where the model is trained, one back.

    >>> print(one_pass(True))
    0F0 0B0
    """
    return Schedule.parse("0F0 0B0" if training else "0F0")


@dataclass(frozen=True)
class StagePrediction:
    """What one stage does in a step: seconds at work, the share of its span that its device idles, seconds in which it
    waits for communication, and bytes on each of its ranks at the worst moment."""

    busy_seconds: float
    bubble: float
    exposed_seconds: float
    memory_bytes: float


@dataclass(frozen=True)
class Stage:
    """Operators of the captured graph, by name, that run together on ``ranks`` (row by row along the axes of the mesh).

    ``decisions`` are routes between layouts, sums between replicas and sizes of bundles: running asks no price again.
    """

    operators: tuple[str, ...]
    ranks: tuple[int, ...]
    strategy: Strategy
    decisions: FixedDecisions = field(default_factory=FixedDecisions)
    prediction: StagePrediction | None = None

    @staticmethod
    def of(graph: Graph, strategy: Strategy, decisions: FixedDecisions | None = None) -> Stage:
        """All operators of a graph on as many ranks as the strategy is for."""
        names, ranks = tuple(op.name for op in graph.ops), tuple(range(strategy.devices))
        return Stage(names, ranks, strategy, decisions or FixedDecisions())

    def mesh_of(self, cluster: Cluster) -> Mesh:
        """Its priced mesh, on its part of a cluster."""
        found = mesh_of(part_of(cluster, self.ranks), self.strategy.sizes)
        named = zip(found.axes, self.strategy.axes, strict=True)
        axes = tuple(replace(axis, name=name) for axis, (name, _) in named)
        return replace(found, axes=axes).with_shares(self.strategy.shares)


@dataclass(frozen=True)
class StageText:
    """A stage, key by key, as it stands in a plan's file."""

    operators: tuple[str, ...]
    ranks: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    splits: dict[str, tuple[str | None, ...]]
    resting: dict[str, tuple[str, ...]]
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    regathered: frozenset[str] = frozenset()
    whole_gradients: frozenset[str] = frozenset()
    recomputed: tuple[str, ...] = ()
    lightly: frozenset[str] = frozenset()
    shares: dict[str, tuple[float, ...]] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
    routes: tuple[RouteText, ...] = ()
    nests: tuple[NestText, ...] = ()
    prediction: StagePrediction | None = None


def strategy_text(s: Strategy, decisions: FixedDecisions) -> dict[str, Any]:
    """A strategy as JSON values."""
    return {
        "mesh": [list(axis) for axis in s.axes],
        "splits": {name: list(split) for name, split in s.splits.items()},
        "resting": {name: layout_text(layout) for name, layout in s.resting.items()},
        "kept": {name: layout_text(layout) for name, layout in s.kept.items()},
        "regathered": sorted(s.regathered),
        "whole_gradients": sorted(s.whole_gradients),
        "recomputed": list(s.recomputed),
        "lightly": sorted(s.lightly),
        "shares": {name: list(shares) for name, shares in s.shares.items()},
        "sizes": vars(decisions.sizes),
        "routes": routes_text(decisions),
        "nests": nests_text(decisions),
    }


def stage_text(stage: Stage) -> dict[str, Any]:
    """A stage as JSON values."""
    about = {"operators": list(stage.operators), "ranks": list(stage.ranks)}
    prediction = None if stage.prediction is None else asdict(stage.prediction)
    return {**about, "prediction": prediction, **strategy_text(stage.strategy, stage.decisions)}


def stage_from(data: StageText, where: str) -> Stage:
    """The inverse of :func:`stage_text`."""
    axes = len(data.mesh)
    if not axes or any(size < 1 for _, size in data.mesh) or len(dict(data.mesh)) != axes:
        raise PlanError(f"{where} is damaged: its mesh is {shown(data.mesh)}.", AGAIN)
    for what, entries in (("splits", data.splits), ("resting", data.resting), ("kept", data.kept)):
        for name, entry in entries.items():
            if len(entry) != axes:
                raise PlanError(
                    f"{where} is damaged: {what}.{name} is {shown(entry)}, and the mesh has {axes} axes.", AGAIN
                )
    strategy = Strategy(
        axes=data.mesh,
        splits=data.splits,
        resting={name: layout_from(layout) for name, layout in data.resting.items()},
        kept={name: layout_from(layout) for name, layout in data.kept.items()},
        regathered=data.regathered,
        recomputed=data.recomputed,
        whole_gradients=data.whole_gradients,
        shares=data.shares,
        lightly=data.lightly,
    )
    decisions = decisions_from(data.sizes, data.routes, data.nests, axes)
    return Stage(data.operators, data.ranks, strategy, decisions, data.prediction)


def schedule_from(rows: Sequence[str], where: str) -> Schedule:
    """A schedule from one line per device."""
    try:
        return Schedule.parse("\n".join(rows))
    except ProblemError as error:
        raise PlanError(f"{where} is damaged: {error.message}", AGAIN) from None


def check_stages(stages: Sequence[Stage], schedule: Schedule) -> None:
    """Refuse stages and a schedule that do not belong together.

    Raises
    ------
    PlanError
    """
    if schedule.stages != len(stages):
        raise PlanError(f"The plan has {len(stages)} stages, its schedule {schedule.stages}.", AGAIN)
    ranks_of: dict[int, tuple[int, ...]] = {}
    for number, (stage, device) in enumerate(zip(stages, schedule.device_of, strict=True)):
        if stage.strategy.devices != len(stage.ranks):
            raise PlanError(
                f"Stage {number} has a mesh of {stage.strategy.devices} devices and the ranks {list(stage.ranks)}.",
                AGAIN,
            )
        if ranks_of.setdefault(device, stage.ranks) != stage.ranks:
            raise PlanError(
                f"Stage {number} runs on ranks {list(stage.ranks)}, another stage of its device on "
                f"{list(ranks_of[device])}.",
                AGAIN,
            )
    every = [rank for ranks in ranks_of.values() for rank in ranks]
    if len(set(every)) != len(every) or min(every, default=0) < 0:
        raise PlanError(f"The ranks of the plan's stages are {sorted(every)}: each must be there once.", AGAIN)


def check_operators(stages: Sequence[Stage], graph: Graph) -> None:
    """Every operator of the graph is in one stage, and values flow to the same or to later stages only."""
    stage_of: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name in stage.operators:
            if stage_of.setdefault(name, number) != number:
                raise PlanError(f"The operator {name!r} is in stages {stage_of[name]} and {number} of the plan.", AGAIN)
    names = {op.name for op in graph.ops}
    if names != stage_of.keys():
        name = min(names ^ stage_of.keys())
        what = "is in no stage of the plan" if name in names else "is in the plan and not in its model"
        raise PlanError(f"The operator {name!r} {what}.", AGAIN)
    for op in graph.ops:
        for tensor in op.inputs:
            maker = graph.producer.get(tensor)
            if maker is not None and stage_of[maker.name] > stage_of[op.name]:
                raise PlanError(
                    f"Stage {stage_of[op.name]} of the plan reads {tensor!r}, which the later stage "
                    f"{stage_of[maker.name]} makes.",
                    "Cut the model so that values flow to later stages.",
                )
