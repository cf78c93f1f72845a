"""Two plans of one model side by side: which decisions differ, and what each costs in either.

Every event of a simulated step belongs to a decision: how a module is split, where parameters rest and how gradients get
there, how much of the update each rank does. A decision costs what its events compute, what they send while nothing
computes, and the idle seconds before them (:mod:`~shardwright.reports.attribution`); what they send under computation is
told beside that. So the seconds of all decisions add up to the step, and their differences to the difference of two plans,
also where their meshes differ. Where the meshes agree, the second plan is simulated once more with each decision taken over
from the first alone.

Of several groups of ranks it is the one that ends the step whose seconds are told apart; what it waits for others is a
decision of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardwright.errors import PlanError
from shardwright.graph import Graph
from shardwright.operators.rules import OpRules
from shardwright.operators.strategy import Strategy
from shardwright.planner import describe_graph
from shardwright.plans import Plan, Stage
from shardwright.plans.serial import layout_text
from shardwright.reports.attribution import Cost, computes, costs
from shardwright.reports.cuts import cut_of
from shardwright.reports.splitting import NUMBERED
from shardwright.reports.steps import ACTIVATIONS, STATISTICS, Event, PlanStep, RankStep, several_passes
from shardwright.search.labels import Labels
from shardwright.simulator import simulate_plan

RESTING, UPDATE, HOST = "parameters and gradients", "optimizer update", "issuing by the host"
STAGES = "stages and micro-batches"
ISSUING = "issuing"
HEAVY = ("matmul", "convolution", "attention", "recurrent", "gather")
"""Kinds of operators whose cuts stand for those of their module."""

ALONE = 3
"""So many decisions, the costliest first, are tried by themselves."""


@dataclass(frozen=True)
class Decision:
    """One decision of two plans: in words for each, what it costs in each, and what the difference is made of.

    ``difference`` is the second's seconds less the first's. ``alone`` is the second plan's step with this decision as the
    first has it and nothing else, where the meshes agree.
    """

    what: str
    first: str
    second: str
    first_cost: Cost
    second_cost: Cost
    parts: dict[str, float]
    alone: float | None = None

    @property
    def difference(self) -> float:
        return self.second_cost.seconds - self.first_cost.seconds

    @property
    def differs(self) -> bool:
        return self.first != self.second


@dataclass
class _Share:
    """What one plan's decision costs, and its seconds by what they are spent on."""

    cost: Cost = field(default_factory=Cost)
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, cost: Cost) -> None:
        self.cost.add(cost)
        self.parts[what] = self.parts.get(what, 0.0) + cost.seconds


@dataclass(frozen=True)
class Difference:
    """Two plans compared; ``decisions`` by how much they matter, the largest difference first."""

    first: Plan
    second: Plan
    decisions: tuple[Decision, ...]
    steps: tuple[PlanStep, PlanStep]

    @property
    def seconds(self) -> float:
        return self.steps[1].timeline.seconds - self.steps[0].timeline.seconds

    def as_dict(self) -> dict[str, Any]:
        """What ``shardwright diff --json`` prints."""
        return {
            "step_seconds": [step.timeline.seconds for step in self.steps],
            "memory_bytes": [step.timeline.peak_bytes for step in self.steps],
            "meshes": [[stage.strategy.axes for stage in plan.stages] for plan in (self.first, self.second)],
            "shape": [step.shape for step in self.steps],
            "difference_seconds": self.seconds,
            "decisions": [{**asdict(d), "difference": d.difference, "differs": d.differs} for d in self.decisions],
        }


def compare(first: Plan, second: Plan, graph: Graph) -> Difference:
    """What differs between two plans of the model that ``graph`` is, and what each difference costs.

    Raises
    ------
    PlanError
        When the plans are not for the same model and inputs.

    Example
    -------
    >>> found = compare(Plan.load("found.json"), Plan.load("megatron.json"), graph)
    >>> [(d.what, d.difference) for d in found.decisions[:3]]
    """
    if first.signature.fingerprint != second.signature.fingerprint:
        raise PlanError(
            f"The plans are for different models: {first.signature.difference(second.signature)}.",
            "Compare plans of one model, batch and sequence length.",
        )
    sides = (PlanStep.of(first, graph), PlanStep.of(second, graph))
    mine, theirs = (_by_decision(side) for side in sides)
    words = [_wording(side) for side in sides]
    decisions = []
    for what in dict.fromkeys((*mine, *theirs)):
        a, b = mine.get(what, _Share()), theirs.get(what, _Share())
        said = [word(what) for word in words]
        names = dict.fromkeys((*a.parts, *b.parts))
        parts = {part: b.parts.get(part, 0.0) - a.parts.get(part, 0.0) for part in names}
        decisions.append(Decision(what, said[0], said[1], a.cost, b.cost, parts))
    decisions.sort(key=lambda d: -abs(d.difference))
    return Difference(first, second, _alone(decisions, first, second, graph), sides)


def family(module: str) -> str:
    """The module that decides together: one level below a repeated block, else the outermost.

    >>> family("blocks.3.attention.query"), family("head"), family("")
    ('blocks.*.attention', 'head', 'the model itself')
    """
    parts = NUMBERED.sub("*", module).split(".") if module else []
    stars = [place for place, part in enumerate(parts) if part == "*"]
    return ".".join(parts[: stars[-1] + 2 if stars else 1]) or "the model itself"


def _by_decision(side: PlanStep) -> dict[str, _Share]:
    """Decision → what it costs on the group of ranks that ends the step."""
    found: dict[str, _Share] = {}

    def note(what: str, part: str, cost: Cost) -> None:
        found.setdefault(what, _Share()).add(part, cost)

    rank, count = side.timeline.ranks[side.last], side.plan.microbatches
    stages = [one.action.stage for one in rank.passes for _ in one.numbers]
    each, gaps = costs(rank)
    for event, stage, cost in zip(rank.events, stages, each, strict=True):
        note(*_decision(event, side.steps[stage]), cost)
    for gap in gaps:
        if not gap.host:
            note(STAGES, "bubbles", Cost(idle=gap.seconds))
            continue
        what, _ = _decision(rank.events[gap.place], side.steps[stages[gap.place]])
        # What the host issues for every micro-batch again, it issues because there are several.
        note(what, ISSUING, Cost(idle=gap.seconds / count))
        if count > 1:
            note(STAGES, f"{ISSUING} again", Cost(idle=gap.seconds * (1 - 1 / count)))
    return found


def _wording(side: PlanStep) -> Callable[[str], str]:
    """Decision → this plan's, as a phrase."""
    plan, graph = side.parts[side.stages(side.last)[0]]
    described = describe_graph(graph)

    def words(what: str) -> str:
        if what == STAGES:
            return f"{side.shape}{'' if several_passes(side.plan) else ', the batch in one go'}"
        if what == HOST:
            return f"{side.plan.devices} devices"
        return _words(what, plan, graph, described.rules, described.labels)

    return words


def _decision(event: Event, step: RankStep) -> tuple[str, str]:
    """Which decision an event belongs to, and what it does there."""
    if event.kind == "update":
        return UPDATE, "computing"
    if computes(event):
        if event.kind == "pack":
            return RESTING, "packing"
        if event.kind == "accumulate" and event.name in step.parameter_tensors:
            return RESTING, "adding"
        about_parameter = event.kind == "change" and event.name in step.parameter_tensors
        return (RESTING, "cutting") if about_parameter else (family(event.module), f"computing, {event.phase}")
    carried = step.carries(event)
    if carried in (ACTIVATIONS, STATISTICS):
        module = step.serves(event) if carried == ACTIVATIONS else event.module
        return family(module), f"{carried} {event.collective.replace('_', '-')}"
    return RESTING, f"{carried} {event.collective.replace('_', '-')}"


def _words(what: str, plan: Plan, graph: Graph, rules: Mapping[str, OpRules], labels: Labels) -> str:
    """A plan's decision as a phrase."""
    strategy = plan.stages[0].strategy
    if what in (RESTING, UPDATE):
        return _resting_words(strategy, graph)
    ops = [op for op in graph.ops if family(op.module) == what]
    if not ops:
        return "on other ranks"
    heavy = [op for op in ops if rules[op.name].kind in HEAVY] or ops
    kinds = [
        Counter(cut_of(strategy.splits[op.name][axis], rules[op.name], labels.get(op.name, {})) for op in heavy)
        for axis in range(len(strategy.axes))
    ]
    again = any(family(path) == what or what.startswith(NUMBERED.sub("*", path)) for path in strategy.recomputed)
    said = "; ".join(f"{name} {size}: {_several(kinds[axis])}" for axis, (name, size) in enumerate(strategy.axes))
    return said + (", recomputed" if again else "")


def _several(counts: Counter[str]) -> str:
    return " and ".join(word for word, _ in counts.most_common(2)) or "whole"


def _resting_words(strategy: Strategy, graph: Graph) -> str:
    """By bytes: how much of the parameters each layout holds."""
    sizes: Counter[str] = Counter()
    for parameter in graph.parameters:
        layout = layout_text(strategy.resting[parameter.tensor])
        cut = [name for (name, _), placed in zip(strategy.axes, layout, strict=True) if placed != "R"]
        sizes[f"cut over {' and '.join(cut)}" if cut else "whole on every rank"] += graph.tensors[
            parameter.tensor
        ].bytes
    total = sum(sizes.values()) or 1
    said = ", ".join(f"{100 * n / total:.0f} % {word}" for word, n in sizes.most_common(3) if n > 0.005 * total)
    return said + (", gathered again for backward" if strategy.regathered else "")


def _alone(decisions: list[Decision], first: Plan, second: Plan, graph: Graph) -> tuple[Decision, ...]:
    ours, theirs = first.stages[0].strategy, second.stages[0].strategy
    meshes = [[(stage.ranks, stage.strategy.axes) for stage in plan.stages] for plan in (first, second)]
    if (
        first.cluster != second.cluster
        or first.schedule != second.schedule
        or meshes[0] != meshes[1]
        or len(meshes[0]) > 1
    ):
        return tuple(decisions)
    tried, left = [], ALONE
    for decision in decisions:
        seconds = None
        if decision.differs and left and decision.what not in (HOST, UPDATE):
            seconds = _simulated(_taken_over(decision.what, ours, theirs, graph), second, graph)
            left -= 1
        tried.append(replace(decision, alone=seconds))
    return tuple(tried)


def _taken_over(what: str, first: Strategy, second: Strategy, graph: Graph) -> Strategy:
    """The second strategy with one decision of the first."""
    if what == RESTING:
        return replace(
            second,
            resting={**second.resting, **{p.tensor: first.resting[p.tensor] for p in graph.parameters}},
            regathered=first.regathered,
            whole_gradients=first.whole_gradients,
        )
    names = {op.name for op in graph.ops if family(op.module) == what}
    made = {out for op in graph.ops if op.name in names for out in op.outputs}
    kept = {t: v for t, v in second.kept.items() if t not in made} | {t: v for t, v in first.kept.items() if t in made}
    return replace(second, splits={**second.splits, **{n: first.splits[n] for n in names}}, kept=kept)


def _simulated(strategy: Strategy, plan: Plan, graph: Graph) -> float | None:
    try:
        return simulate_plan(replace(plan, stages=(Stage.of(graph, strategy),)), graph).seconds
    except PlanError:
        return None  # the two plans' layouts do not meet there
