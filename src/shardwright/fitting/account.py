"""What one configuration takes of a device: the peak of its step, by kind, from the replay of its program.

The program is the one that a plan of this configuration runs (:func:`~shardwright.exchange.planning.laid_like`), replayed
by the account that judges every plan (:mod:`shardwright.costs.memory`, :mod:`shardwright.costs.passes`). Of a deep model two
short ones are replayed (:mod:`shardwright.graph.shorten`): every further block adds the same bytes to the same moment of the
step. Which moment is the worst may differ between a short and a deep model (a short one holds most at its loss, a deep one
in its optimizer), so every part of the step has its own line through both, and the highest of them in the end is the peak.

What another engine is known to hold otherwise than its plan here (:mod:`shardwright.fitting.engines`) is counted as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from shardwright.cluster import Cluster
from shardwright.costs.memory import ACTIVATIONS, GATHERED, GRADIENTS, PARAMETERS
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.exchange import Configuration
from shardwright.exchange.planning import laid_like
from shardwright.fitting.engines import (
    computes_again,
    in_half_precision,
    keeps_whole,
    kept_whole,
    met,
    rests_in_float32,
)
from shardwright.fitting.reserving import reserved
from shardwright.graph import Graph
from shardwright.graph.shorten import longest_run, shortened
from shardwright.planner import Options
from shardwright.program import Kind, Sizes
from shardwright.program.dataflow import Compute
from shardwright.program.mean_losses import origin
from shardwright.program.microbatches import WHOLE
from shardwright.program.pipeline import Pipeline
from shardwright.simulator import Timeline
from shardwright.simulator.links import Links
from shardwright.simulator.peaks import Moment, alive_at, moments
from shardwright.simulator.stages import PricedStage, price_stages
from shardwright.simulator.timeline import simulated

BLOCKS = 3
"""Blocks of the shorter of two short models, the other has twice as many: what is gathered ahead and what is under way is
then as in a deep one (a test compares with replays of all blocks)."""

LARGE = 8 * Sizes().bucket
"""Blocks with fewer bytes of parameters are gathered and reduced in no block's rhythm."""

ALLOCATOR = "allocator"
"""What is needed beyond the bytes in use: rounding, and what a step recorded as CUDA graphs keeps apart."""


@dataclass(frozen=True)
class Account:
    """A predicted step of so many ``seconds``: ``bytes`` that every device must have, and what they are at the worst moment
    (``kinds``, which add up to them). ``during`` says when that is; ``whole``: all blocks were replayed."""

    seconds: float
    bytes: float
    kinds: tuple[tuple[str, float], ...]
    during: str
    whole: bool


def account(
    graph: Graph, cluster: Cluster, c: Configuration, options: Options | None = None, *, ring: int = 1
) -> Account:
    """What a configuration takes of a device. ``ring``: so many ranks share every sequence, of which the graph's rows
    are the parts (:func:`~shardwright.fitting.engines.of_one_rank`).

    Raises
    ------
    ConfigurationError, LoweringError
        When the degrees do not make these devices, or the model cannot be cut so.

    Example
    -------
    >>> account(graph, parse_cluster("8xH100"), Configuration("fsdp", shard=8)).kinds            # doctest: +SKIP
    """
    options = options or Options()
    run = longest_run(graph)
    # Of a pipeline two in every stage: one alone has none that is gathered while another is computed.
    few = c.stages * max(ceil(max(BLOCKS, _rhythm(graph)) / c.stages), min(c.stages, 2))
    short = [shortened(graph, n) for n in (few, 2 * few)] if run is not None and run.count > 2 * few else []
    parts = [part for part in short if part is not None]
    if len(parts) == 2 and run is not None:
        less, more = (_step(part, cluster, replace(c, cuts=()), options, ring) for part in parts)
        fullest = c.stages * ceil(run.count / c.stages)  # the stage with most of the blocks counts
        return _lengthened(less, more, fullest / few - 2)
    only = _step(graph, cluster, c, options, ring)
    return _lengthened(only, only, 0.0)


def taken(graph: Graph, cluster: Cluster, c: Configuration, options: Options | None = None, *, ring: int = 1) -> float:
    """What PyTorch's allocator takes from the device in a configuration's steps, where there is room and none is recorded:
    more than is ever in use (:mod:`shardwright.fitting.reserving`). Where fragments lie follows no line from short models to
    a deep one, so all blocks are replayed, except of pipelines.

    >>> taken(graph, parse_cluster("8xH100"), Configuration("fsdp", shard=8)) > 0                 # doctest: +SKIP
    True
    """
    run, options = longest_run(graph), options or Options()

    def most(part: Graph) -> float:
        timeline = _timeline(part, cluster, replace(c, cuts=()) if part is not graph else c, options)
        again, beside = computes_again(part, c), met(part, c, ring)
        return float(max(reserved(timeline, group, c, again, beside) for group in range(timeline.groups)))

    few = 2 * c.stages
    short = [shortened(graph, n) for n in (few, 2 * few)] if c.pipeline > 1 and run and run.count > 2 * few else []
    parts = [part for part in short if part is not None]
    if len(parts) < 2 or run is None:
        return most(graph)
    less, more = map(most, parts)
    return more + (c.stages * ceil(run.count / c.stages) / few - 2) * (more - less)


def _rhythm(graph: Graph) -> int:
    """Blocks that have together as many bytes of parameters as :data:`BLOCKS` large ones."""
    run = longest_run(graph)
    if run is None:
        return 0
    read = {name for op in graph.ops[run.start : run.start + run.period] for name in op.inputs}
    size = sum(graph.tensors[name].bytes for name in read if name in graph.parameter_of)
    return ceil(BLOCKS * LARGE / max(size, 1))


class _Line(NamedTuple):
    """The worst moment of a part of the step: its bytes, what they are, and when it is."""

    bytes: float
    kinds: Mapping[str, float]
    during: str


class _Step(NamedTuple):
    """Of one replayed step: seconds, and for every group of ranks the worst moment of each part and the bytes that are
    needed beyond those in use."""

    seconds: float
    parts: Sequence[Mapping[tuple[object, ...], _Line]]
    beyond: Sequence[float]


def _lengthened(less: _Step, more: _Step, further: float) -> Account:
    """The step with so many times the difference between both beyond the longer one."""

    def line(short: float, long: float) -> float:
        return long + further * (long - short)

    worst: tuple[float, int, tuple[object, ...]] | None = None
    for group, (short, long) in enumerate(zip(less.parts, more.parts, strict=True)):
        beyond = line(less.beyond[group], more.beyond[group])
        for key in long:
            here = line(short[key].bytes, long[key].bytes) if key in short else long[key].bytes
            if worst is None or here + beyond > worst[0]:
                worst = here + beyond, group, key
    assert worst is not None
    needed, group, key = worst
    long_line = more.parts[group][key]
    short_line = less.parts[group].get(key, long_line)
    names = dict.fromkeys([*long_line.kinds, *short_line.kinds])
    kinds = {name: line(short_line.kinds.get(name, 0.0), long_line.kinds.get(name, 0.0)) for name in names}
    kinds[ALLOCATOR] = needed - sum(kinds.values())
    told = tuple(sorted(((name, size) for name, size in kinds.items() if size), key=lambda one: -one[1]))
    return Account(line(less.seconds, more.seconds), needed, told, long_line.during, whole=further == 0.0)


def _step(graph: Graph, cluster: Cluster, c: Configuration, options: Options, ring: int) -> _Step:
    """One step replayed."""
    timeline = _timeline(graph, cluster, c, options)
    groups = range(timeline.groups)
    again, keys_and_values = computes_again(graph, c), met(graph, c, ring)
    parts = [_parts(timeline, group, graph) for group in groups]
    fullest = [max(one.bytes for one in part.values()) for part in parts]
    beyond = [_needed(timeline, group) - fullest[group] for group in groups]
    if again:
        parts = [_parts(timeline, group, graph, again) for group in groups]
    if keeps_whole(c):
        parts = [{key: _kept_whole(timeline, group, one) for key, one in parts[group].items()} for group in groups]
    if rests_in_float32(c):
        parts = [{key: _without_halves(timeline, group, one) for key, one in parts[group].items()} for group in groups]
    if keys_and_values:
        parts = [{key: _meeting(key, one, keys_and_values) for key, one in part.items()} for part in parts]
    return _Step(timeline.seconds, parts, beyond)


def _stages(timeline: Timeline, group: int) -> set[int]:
    return {action.stage for action in timeline.pipeline.schedule.orders[group]}


def _without_halves(timeline: Timeline, group: int, line: _Line) -> _Line:
    """A moment of a group whose parameters rest in float32 alone."""
    less = sum(in_half_precision(timeline.stage(stage).program) for stage in _stages(timeline, group))
    kinds = {name: size - less if name == PARAMETERS else size for name, size in line.kinds.items()}
    return _Line(line.bytes - less, kinds, line.during)


def _meeting(key: tuple[object, ...], line: _Line, keys_and_values: float) -> _Line:
    """A moment of a block, with the keys and values of all ranks that share a sequence."""
    if key[-1] not in BLOCK:
        return line
    kinds = {**line.kinds, GATHERED: line.kinds.get(GATHERED, 0.0) + keys_and_values}
    return _Line(line.bytes + keys_and_values, kinds, line.during)


def _kept_whole(timeline: Timeline, group: int, line: _Line) -> _Line:
    """A moment of a group whose engine keeps gathered parameters and float32 gradients between passes; after the last pass
    back it has let go of them."""
    if line.during == CLOSING:
        return line
    whole = [kept_whole(timeline.stage(stage).program) for stage in _stages(timeline, group)]
    kinds = dict(line.kinds)
    kinds[GATHERED] = max(kinds.get(GATHERED, 0.0), float(sum(one.gathered for one in whole)))
    if kinds.get(GRADIENTS):
        kinds[GRADIENTS] += sum(one.gradients for one in whole)
    return _Line(line.bytes + sum(kinds.values()) - sum(line.kinds.values()), kinds, line.during)


def _recorded(timeline: Timeline, group: int) -> bool:
    """Whether a group's step is recorded as CUDA graphs. One device alone runs the model as it is."""
    stage = timeline.stage(timeline.pipeline.schedule.device_of.index(group))
    return stage.planned is not None and len(timeline.pipeline.workers) > 1


def _needed(timeline: Timeline, group: int) -> float:
    """Bytes that a device must have."""
    stage = timeline.stage(timeline.pipeline.schedule.device_of.index(group))
    return timeline.memory[group] if stage.planned is None or _recorded(timeline, group) else float(stage.memory.peak)


def _timeline(graph: Graph, cluster: Cluster, c: Configuration, options: Options) -> Timeline:
    stages, order = laid_like(graph, cluster, c, options)
    meshes = [stage.mesh_of(cluster) for stage in stages]
    norm = options.batch_norm if order.microbatches > 1 else WHOLE
    pipe = Pipeline.of(graph, stages, order.microbatches, order, norm)
    decided = [
        PricedDecisions(mesh.with_shares(stage.strategy.shares)) for mesh, stage in zip(meshes, stages, strict=True)
    ]
    return simulated(price_stages(pipe, meshes, decided, c.optimizer), Links(pipe, cluster))


def _parts(
    timeline: Timeline, group: int, graph: Graph, again: frozenset[str] = frozenset()
) -> dict[tuple[object, ...], _Line]:
    """The worst moment of every part of a group's step: by stage, kind of pass, and where in the run of blocks it is."""
    order, sizes = timeline.pipeline.schedule.orders[group], timeline.pipeline.micro.sizes
    regions = {key: _regions(stage, graph) for key, stage in timeline.times.items()}
    recorded = _recorded(timeline, group)
    found: dict[tuple[object, ...], Moment] = {}
    for moment in moments(timeline, group):
        keys: list[tuple[object, ...]] = [("after the last pass",)]
        if moment.place >= 0:
            action = order[moment.place]
            where = regions[action.stage, sizes[action.microbatch]][moment.event]
            if recorded and UPDATE in where:
                continue  # takes its temporaries beside what is recorded, which is kept meanwhile
            keys = [(action.stage, action.kind, region) for region in where]
        elif recorded:
            continue
        for key in keys:
            if key not in found or moment.bytes > found[key].bytes:
                found[key] = moment
    return {key: _line(timeline, group, moment, again) for key, moment in found.items()}


def _line(timeline: Timeline, group: int, moment: Moment, again: frozenset[str]) -> _Line:
    kinds, less = dict[str, float](), 0
    for one in alive_at(timeline, group, moment):
        if one.kind == ACTIVATIONS and one.module in again:
            less += one.bytes
        else:
            kinds[one.kind] = kinds.get(one.kind, 0.0) + one.bytes
    moment = moment._replace(bytes=moment.bytes - less)
    if moment.place < 0:
        return _Line(moment.bytes, kinds, CLOSING)
    order, sizes = timeline.pipeline.schedule.orders[group], timeline.pipeline.micro.sizes
    action = order[moment.place]
    event = timeline.times[action.stage, sizes[action.microbatch]].events[moment.event]
    if event.kind == UPDATE:
        return _Line(moment.bytes, kinds, "the update")
    where = f" ({event.module})" if event.module else ""
    stage = f", stage {action.stage}" if timeline.pipeline.schedule.stages > 1 else ""
    return _Line(moment.bytes, kinds, f"{event.phase} of {event.name}{where}{stage}")


CLOSING = "the reduction of gradients and the update"
BEFORE, FIRST, EARLY, LATE, LAST, AFTER = "before", "first block", "early blocks", "late blocks", "last block", "after"
BLOCK = (FIRST, EARLY, LATE, LAST)
UPDATE = "update"


def _regions(stage: PricedStage, graph: Graph) -> list[tuple[str, ...]]:
    """Of every instruction, in which part of the model it is: before the run of blocks, in it, after it, or the update. What
    is no operator is where the operator before it is."""
    run = longest_run(graph)
    place = {op.name: number for number, op in enumerate(graph.ops)}
    here: tuple[str, ...] = (BEFORE,)
    program, found = stage.program, list[tuple[str, ...]]()
    for instruction in program.instructions:
        node = program.flow.nodes[instruction.node] if instruction.node >= 0 else None
        if instruction.kind is Kind.UPDATE:
            here = (UPDATE,)
        elif isinstance(node, Compute) and run is not None:
            here = _region((place.get(origin(node.op.name), 0) - run.start) // run.period, run.count)
        found.append(here)
    return found


def _region(block: int, count: int) -> tuple[str, ...]:
    """The parts that a block of a run belongs to: its ends differ from what is between them, and there bytes grow or shrink
    from block to block, so that one of the two halves has the most.

    >>> [_region(block, 3) for block in (-1, 0, 1, 2, 3)]
    [('before',), ('first block',), ('early blocks', 'late blocks'), ('last block',), ('after',)]
    """
    if not 0 < block < count - 1:
        return (BEFORE if block < 0 else FIRST if block == 0 else LAST if block == count - 1 else AFTER,)
    return (EARLY,) * (block <= count // 2) + (LATE,) * (block >= (count - 1) // 2)
