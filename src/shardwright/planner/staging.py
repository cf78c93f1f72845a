"""A pipeline that was found, as stages of the whole model: which operators a stage has, and how they are split there.

Of a run of blocks the joint search splits a model of three; every operator of a stage takes the split of its twin there,
every tensor the layout of its twin. A general graph is split whole: every operator is its own twin. A parameter that several
stages hold lies whole in each, for its gradients are summed between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import LoweringError
from shardwright.graph import Graph, Op
from shardwright.graph.repeats import Repeat, block_paths, span_of
from shardwright.graph.shorten import longest_run
from shardwright.operators import analyse
from shardwright.operators.rules import Layout, Need, Split, Window, input_layouts
from shardwright.operators.strategy import Strategy
from shardwright.planner.cutting import complete
from shardwright.planner.proposals import Laid, Proposal, Shape
from shardwright.plans import Prediction, Stage
from shardwright.program.microbatches import microbatches
from shardwright.program.stages import StageGraph, stage_graphs
from shardwright.schedules import Schedule, known_schedule
from shardwright.search.joint.orders import OTHERS
from shardwright.search.joint.pipelines import JointPlan, JointStage

BLOCKS_PRICED = 3
"""Blocks of the model that the joint search splits; all others are like the middle one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Composed(Proposal):
    """A pipeline that the joint search composed, for the whole ``graph``."""

    graph: Graph
    batch_norm: str
    found: JointPlan

    @property
    def changed(self) -> float:
        """By how much simulating it changed its sums."""
        return self.seconds / self.found.step_seconds

    def laid(self) -> Laid:
        found = self.found
        cut = microbatches(self.graph, found.microbatches, self.batch_norm)
        micro, order = cut.graphs[found.microbatch], _order(found, whole_batch=cut.tail is not None)
        cuts = operators_by_stage(self.graph, micro, found.stages)
        parts = stage_graphs(micro, cuts)
        twins, shared = Twins.of(micro, found.stages[0]), held_by_several(parts)
        stages = tuple(
            Stage(
                tuple(names),
                tuple(range(stage.first_device, stage.first_device + stage.devices)),
                stage_strategy(stage, part, twins, shared),
            )
            for stage, part, names in zip(found.stages, parts, cuts, strict=True)
        )
        return Laid(stages, order)


def shape_of(found: JointPlan) -> Shape:
    """A pipeline in the words of a mesh: its stages and its micro-batches."""
    return (("stage", len(found.stages)), ("micro-batch", found.microbatches))


def expected(found: JointPlan) -> Prediction:
    """The sums by which a pipeline was found; what it sends is what the busiest device sends to other stages."""
    busy: dict[int, float] = {}  # by group of devices
    for stage in found.stages:
        own = stage.seconds * found.microbatches + stage.closing_seconds
        busy[stage.first_device] = busy.get(stage.first_device, 0.0) + own
    memory = max(stage.memory_bytes for stage in found.stages)
    return Prediction(found.step_seconds, max(busy.values()), memory, found.boundary_bytes, 0.0, True)


def _order(found: JointPlan, *, whole_batch: bool) -> Schedule:
    """The order of passes that a pipeline was found for; all forward passes first where the loss needs the whole batch."""
    stages, groups = len(found.stages), len(found.groups)
    if whole_batch and found.schedule in OTHERS:
        raise LoweringError(
            f"The loss needs the whole batch, so all forward passes come first, not in the order {found.schedule}.",
            "Plan with --schedule gpipe.",
        )
    plain = stages == 1 and not whole_batch  # one stage holds one micro-batch, as it was searched
    name = "1f1b" if plain else "gpipe" if whole_batch else found.schedule
    return known_schedule(name, stages, found.microbatches, groups)


class Twins:
    """Which operator and tensor of the priced model of few blocks stands for one of the whole micro-batch's graph."""

    def __init__(self, graph: Graph, run: Repeat) -> None:
        self.graph, self.run = graph, run
        self.place = {op.name: index for index, op in enumerate(graph.ops)}
        self.priced = min(BLOCKS_PRICED, run.count)
        self.blocks = block_paths(graph)

    @staticmethod
    def of(graph: Graph, stage: JointStage) -> Twins:
        """Those of a graph in which a stage was found: of its longest run, or where stages have ``operators``, of none."""
        run = longest_run(graph) if not stage.operators else None
        return Twins(graph, run or Repeat(0, 0, 0))

    def op(self, op: Op) -> Op:
        run, index = self.run, self.place[op.name]
        if not run.start <= index < run.stop:
            return op
        block, inside = divmod(index - run.start, run.period)
        middle = min(1, self.priced - 1)
        twin = 0 if block == 0 else self.priced - 1 if block == run.count - 1 else middle
        return self.graph.ops[run.start + twin * run.period + inside]

    @cached_property
    def tensors(self) -> dict[str, str]:
        """Tensors that an operator makes or reads → those that its twin does."""
        found: dict[str, str] = {}
        for op in self.graph.ops:
            twin = self.op(op)
            for mine, theirs in [
                *zip(op.outputs, twin.outputs, strict=True),
                *zip(op.inputs, twin.inputs, strict=True),
            ]:
                if mine is not None and theirs is not None and (mine not in self.graph.producer or mine in op.outputs):
                    found.setdefault(mine, theirs)
        return found


def operators_by_stage(graph: Graph, micro: Graph, stages: Sequence[JointStage]) -> list[list[str]]:
    """Operators of the captured graph that every stage has."""
    if stages[0].operators:
        return complete(graph, [stage.operators for stage in stages])
    run = longest_run(micro)
    assert run is not None  # it was priced by its blocks
    return [operators_of(graph, micro, run, stage) for stage in stages]


def operators_of(graph: Graph, micro: Graph, run: Repeat, stage: JointStage) -> list[str]:
    """Operators of the captured graph that a stage has: its blocks, what stands before the first and after the last."""
    start = 0 if stage.first_block == 0 else run.start + stage.first_block * run.period
    stop = len(micro.ops) if stage.last_block == run.count else run.start + stage.last_block * run.period
    inside = {op.name for op in micro.ops[start:stop]}
    known = {op.name for op in micro.ops}
    names, last = [], ""
    for op in graph.ops:  # what no micro-batch computes (it was prepared before) goes with what comes before it
        if op.name in inside or (op.name not in known and last in inside):
            names.append(op.name)
        if op.name in known:
            last = op.name
        elif not last and start == 0:
            names.append(op.name)
    return names


def held_by_several(parts: Sequence[StageGraph]) -> frozenset[str]:
    """Parameters that several stages hold: whole in each, for their gradients are summed between them."""
    held = [p.tensor for part in parts for p in part.graph.parameters]
    return frozenset(name for name in held if held.count(name) > 1)


def _as_read(graph: Graph, name: str, splits: Mapping[str, Split]) -> tuple[Need, ...]:
    """A tensor as its only reader needs it."""
    op = graph.consumers[name][0]
    return input_layouts(analyse(op, graph.tensors), splits[op.name], len(op.inputs))[op.inputs.index(name)]


def stage_strategy(stage: JointStage, part: StageGraph, twins: Twins, shared: frozenset[str]) -> Strategy:
    """The priced strategy for the operators and tensors of one stage."""
    priced, whole = stage.strategy, (Replicate(),) * len(stage.strategy.axes)
    splits = {op.name: priced.splits[twins.op(op).name] for op in part.graph.ops}

    def lies(name: str) -> Layout:
        if name in shared:
            return whole
        twin = twins.tensors.get(name, name)
        if name in part.received:
            layout: Sequence[Need] = priced.kept.get(twin) or _as_read(part.graph, name, splits)
        else:
            layout = priced.resting.get(twin, whole)
        return tuple(Replicate() if isinstance(p, Partial | Window) else p for p in layout)

    made = {name for op in part.graph.ops for name in op.outputs if name}
    kept = {name: priced.kept[twin] for name in made if (twin := twins.tensors.get(name, name)) in priced.kept}
    resting = {name: lies(name) for name in part.graph.sources}
    parameters = {p.tensor for p in part.graph.parameters} - shared
    again = frozenset(name for name in parameters if twins.tensors.get(name, name) in priced.regathered)
    if any(
        isinstance(p, Shard) and p.dim >= len(part.graph.tensors[n].shape) for n, lay in resting.items() for p in lay
    ):
        raise LoweringError("A stage would cut a tensor along a dim that it does not have.", "Plan without stages.")
    # Of the whole micro-batch: a stage of one block has nothing in it that repeats.
    blocks = [path for path in twins.blocks if span_of(part.graph, path)]
    wholly, every = stage.recomputed_blocks, stage.recomputed_blocks + stage.lightly_blocks
    lightly = frozenset(blocks[wholly:every])
    return Strategy(
        priced.axes, splits, resting, kept, again, tuple(blocks[:every]), shares=priced.shares, lightly=lightly
    )
