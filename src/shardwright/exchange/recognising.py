"""From a plan to the configuration that says most of it: degrees, schedule, micro-batches, recomputation, precision.

An axis of a stage's mesh is what most of the work of its products cuts with it: rows of the batch (``replicate``, or
``shard`` where parameters lie in shards there), positions (``context``), features (``tensor``), experts. Whatever a plan
decides beside that (an operator cut otherwise, uneven shares, a cut inside a module) no configuration says; it is listed
as lost, with what the configuration has instead.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Shard

from shardwright.cluster.mesh import across_nodes
from shardwright.errors import ProblemError
from shardwright.exchange.configuration import (
    BLOCKS,
    DEGREES,
    GRADIENTS,
    LIGHT,
    NOTHING,
    OPTIMIZER,
    PARAMETERS,
    Configuration,
    Remark,
)
from shardwright.exchange.hugging_face import COLUMNS, ROWS
from shardwright.graph import Graph, Op
from shardwright.graph.repeats import block_paths, span_of
from shardwright.operators import record
from shardwright.operators.strategy import Strategy
from shardwright.planner import describe_graph
from shardwright.plans import Plan
from shardwright.plans.stages import Stage
from shardwright.program.microbatches import batch_of
from shardwright.schedules import RECIPES, Schedule, known_schedule
from shardwright.search.formulate import Described

PRODUCTS = ("matmul", "attention", "convolution", "recurrent")
"""Kinds of operators that say what an axis is for."""

DATA, CONTEXT, TENSOR, EXPERT, WHOLE = "rows of the batch", "positions", "features", "experts", "nothing"

NAMED = 3
"""So many operators or parameters are named in a remark; the others are counted."""


@dataclass(frozen=True)
class Recognised:
    """The configuration nearest to a plan, and what of the plan it does not say: the ``value`` is the plan's, ``why``
    what the configuration has instead."""

    configuration: Configuration
    lost: tuple[Remark, ...]


@dataclass(frozen=True)
class _Axis:
    """What an axis of a mesh is for: ``expert`` where experts are cut along it, ``sharded`` where parameters are."""

    name: str
    size: int
    role: str
    expert: bool
    sharded: bool
    sequence: bool


def recognise(plan: Plan, graph: Graph) -> Recognised:
    """The configuration that says most of a plan.

    Example
    -------
    >>> recognise(plan, plan.graph()).configuration.summary()                                    # doctest: +SKIP
    'shard 4 (parameters) × tensor 2, micro-batches of 4, float32, adamw'
    """
    described, lost = describe_graph(graph), list[Remark]()
    every = [
        axes_of(stage, described, lost, f"stage {n}: " * (len(plan.stages) > 1)) for n, stage in enumerate(plan.stages)
    ]
    axes = every[0]
    for number, others in enumerate(every):
        if [(a.size, a.role, a.sharded) for a in others] != [(a.size, a.role, a.sharded) for a in axes]:
            lost.append(Remark(f"mesh of stage {number}", _mesh_text(others), f"{_mesh_text(axes)}, as in stage 0"))
    degrees = _degrees(axes, lost)
    strategies = [stage.strategy for stage in plan.stages]
    devices, stages = plan.schedule.devices, len(plan.stages)
    each = stages // devices
    if stages % devices:
        lost.append(Remark("stages", str(stages), f"{each} on each of {devices} groups of ranks"))
        each = max(each, 1)
    batch = batch_of(graph) or plan.batch or 1
    data, passes = degrees["replicate"] * degrees["shard"], plan.microbatches
    if batch % (data * passes):
        lost.append(Remark("rows", f"{batch} on {data} ranks in {passes} passes", "equal pieces"))
    sharding, reshard = _sharding(strategies, graph, described, degrees)
    recompute, share = _recomputation(strategies, graph, lost)
    found = Configuration(
        engine="plan",
        devices=plan.devices,
        **degrees,
        sequence=any(a.sequence for a in axes if a.role == TENSOR),
        pipeline=devices,
        expert=math.prod(a.size for a in axes if a.expert),
        sharding=sharding,
        reshard=reshard,
        schedule=_schedule(plan.schedule, lost),
        stages_per_device=each,
        cuts=_cuts(plan, graph, lost),
        microbatch=max(batch // (data * passes), 1),
        microbatches=passes,
        batch=max(batch // (data * passes), 1) * data * passes,
        length=plan.sequence or _length(graph),
        recompute=recompute,
        recomputed_share=share,
        precision=_precision(graph),
        optimizer="sgd" if plan.optimizer.startswith("sgd") else "adamw",
        modules=_modules(plan, graph, axes),
    )
    for number, strategy in enumerate(strategies):
        for name, shares in strategy.shares.items():
            told = ", ".join(f"{one:.0%}" for one in shares)
            lost.append(Remark(f"shares of axis {name} of stage {number}", told, "equal shares"))
    return Recognised(found, tuple(lost))


def axes_of(stage: Stage, described: Described, lost: list[Remark], where: str) -> list[_Axis]:
    graph, strategy = described.graph, stage.strategy
    own = set(stage.operators)
    ops = [op for op in graph.ops if op.name in own and op.name in strategy.splits]
    return [
        _axis(place, name, size, ops, strategy, described, lost, where)
        for place, (name, size) in enumerate(strategy.axes)
        if size > 1
    ]


def _axis(
    place: int,
    name: str,
    size: int,
    ops: Iterable[Op],
    strategy: Strategy,
    described: Described,
    lost: list[Remark],
    where: str,
) -> _Axis:
    graph, rules = described.graph, described.rules
    work, by_role = Counter[str](), dict[str, list[Op]]()
    between, cut_between = 0, 0
    for op in ops:
        loop = strategy.splits[op.name][place]
        role = role_of(op, loop, described)
        if record(op.target).kind in PRODUCTS:
            work[role] += max(int(rules[op.name].flops), 1)
            by_role.setdefault(role, []).append(op)
        elif "sequence" in described.labels[op.name].values():
            elements = sum(graph.tensors[out].elements for out in op.outputs if out)
            between += elements if record(op.target).kind == "normalisation" else 0
            cut_between += elements if record(op.target).kind == "normalisation" and role == CONTEXT else 0
    expert = bool(work.pop(EXPERT, 0))
    role = max(work, key=lambda one: (one != WHOLE, work[one])) if work else (EXPERT if expert else WHOLE)
    if work and work[WHOLE] > sum(work.values()) / 2:
        role = max(work, key=lambda one: work[one])
    others = [op for other, ops_of in by_role.items() if other not in (role, EXPERT) for op in ops_of]
    if others:
        part = sum(work[other] for other in work if other != role) / sum(work.values())
        kinds = ", ".join(sorted({other for other in by_role if other not in (role, EXPERT)}))
        names = [op.module or op.name for op in others]
        key = f"{where}axis {name}"
        lost.append(Remark(key, f"{kinds} for {named(names)} ({part:.0%} of the products' work)", f"{role} for all"))
    held = {p.tensor for p in graph.parameters}
    read = {name for op in ops for name in op.inputs if name in held and name in strategy.resting}
    bytes_of = Counter[bool]()
    for tensor in read:
        bytes_of[isinstance(strategy.resting[tensor][place], Shard)] += graph.tensors[tensor].bytes
    sharded = bytes_of[True] > bytes_of[False]
    if role in (DATA, WHOLE):
        odd = [
            t
            for t in read
            if isinstance(strategy.resting[t][place], Shard) != sharded and graph.tensors[t].elements > 1
        ]
        size_of = sum(graph.tensors[t].bytes for t in odd)
        if odd and size_of:
            names = [graph.parameter_of[t].paths[0] for t in sorted(odd)]
            said = f"{'whole' if sharded else 'in shards'} for {named(names)} ({size_of:,} bytes)"
            lost.append(Remark(f"{where}parameters on axis {name}", said, f"all {'in shards' if sharded else 'whole'}"))
    return _Axis(name, size, role, expert, sharded, 2 * cut_between > between)


def role_of(op: Op, loop: str | None, described: Described) -> str:
    """What a loop of an operator runs over, in the words of configurations."""
    if loop is None:
        return WHOLE
    label = described.labels[op.name].get(loop)
    if label:
        return DATA if label == "batch" else CONTEXT
    rule, graph = described.rules[op.name].by_name.get(loop), described.graph
    if rule is None:
        return WHOLE
    if record(op.target).kind == "convolution":
        return TENSOR
    for name, need in zip(op.inputs, rule.inputs, strict=True):
        weight = parameter_behind(graph, name)
        if weight and len(graph.tensors[weight].shape) > 2 and need == Shard(0) and isinstance(rule.outputs[0], Shard):
            return EXPERT
    return TENSOR


def parameter_behind(graph: Graph, name: str) -> str:
    """The parameter that a tensor is, or is a view or a copy of."""
    while name not in graph.parameter_of:
        maker = graph.producer.get(name)
        if maker is None or len(maker.inputs) != 1 or record(maker.target).kind not in ("view", "copy"):
            return ""
        name = maker.inputs[0]
    return name


def _degrees(axes: list[_Axis], lost: list[Remark]) -> dict[str, Any]:
    degrees: dict[str, Any] = dict.fromkeys(DEGREES, 1)
    order, links = [], list[bool]()
    for axis in axes:
        name = {CONTEXT: "context", TENSOR: "tensor"}.get(axis.role, "shard" if axis.sharded else "replicate")
        degrees[name] *= axis.size
        order.append(name)
        links.append(across_nodes(axis.name))
        if axis.role == WHOLE:
            lost.append(Remark(f"axis {axis.name}", "every rank does all of it", f"{name} {axis.size}"))
    across = [name for name, link in zip(order, links, strict=True) if link != links[-1]]
    within = [name for name, link in zip(order, links, strict=True) if link == links[-1]]
    if any(DEGREES.index(far) > DEGREES.index(near) for far in across for near in within):
        said = " × ".join(sorted(order, key=DEGREES.index))
        lost.append(Remark("order of axes, slowest link first", " × ".join(order), said))
    return degrees


def _sharding(
    strategies: Iterable[Strategy], graph: Graph, described: Described, degrees: Mapping[str, int]
) -> tuple[str, bool]:
    """What is divided, and whether gathered parameters are freed after forward, by most bytes that lie in shards."""
    if degrees["shard"] == 1:
        return PARAMETERS, True
    sums = Counter[tuple[str, bool]]()
    for strategy in strategies:
        for tensor in [p.tensor for p in graph.parameters if p.tensor in strategy.resting]:
            if tensor in strategy.regathered:
                way = (OPTIMIZER, False) if tensor in strategy.whole_gradients else (PARAMETERS, True)
            else:
                way = (OPTIMIZER if tensor in strategy.whole_gradients else GRADIENTS, False)
            if any(isinstance(p, Shard) for p in strategy.resting[tensor]):
                sums[way] += graph.tensors[tensor].bytes
    return max(sums, key=lambda way: sums[way]) if sums else (PARAMETERS, True)


def _recomputation(strategies: Iterable[Strategy], graph: Graph, lost: list[Remark]) -> tuple[str, float]:
    again = {path for s in strategies for path in s.recomputed}
    lightly = {path for s in strategies for path in s.lightly} & again
    blocks = block_paths(graph)
    if not again:
        return NOTHING, 1.0
    share = min(len(again) / max(len(blocks), len(again)), 1.0)
    if lightly and lightly != again:
        kinds = f"{len(lightly)} blocks lightly, {len(again - lightly)} whole"
        way = LIGHT if 2 * len(lightly) > len(again) else BLOCKS
        lost.append(Remark("recomputation", kinds, f"all {'lightly' if way == LIGHT else 'whole'}"))
    else:
        way = LIGHT if lightly else BLOCKS
    if way == LIGHT and share < 1:
        lost.append(Remark("recomputation", f"{share:.0%} of the blocks lightly", "all lightly"))
        share = 1.0
    return way, share


def _schedule(schedule: Schedule, lost: list[Remark]) -> str:
    if schedule.devices == 1:
        return "1f1b"
    for name in RECIPES:
        try:
            known = known_schedule(name, schedule.stages, schedule.microbatches, schedule.devices)
        except ProblemError:
            continue
        if known.orders == schedule.orders:
            return name
    each = schedule.stages // schedule.devices
    shape = schedule.device_of[: 2 * schedule.devices]
    instead = (
        "1f1b" if each == 1 else "zb-v" if each == 2 and shape[schedule.devices - 1] == shape[-schedule.devices] else ""
    )
    instead = instead or "interleaved-1f1b"
    lost.append(Remark("schedule", "an order of passes of its own", instead))
    return instead


def _cuts(plan: Plan, graph: Graph, lost: list[Remark]) -> tuple[str, ...]:
    """The modules before which stages begin: where one tensor crosses, as between blocks; else the nearest block."""
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.operators}
    blocks = {span_of(graph, path).start: path for path in block_paths(graph)}
    found, last = list[str](), 0
    for number in range(1, len(plan.stages)):
        index = next(
            i
            for i, op in enumerate(graph.ops)
            if stage_of[op.name] == number and any(graph.tensors[out].grad for out in op.outputs if out)
        )
        path = _begins(graph, index, number, stage_of) if _crossing(graph, number, stage_of) == 1 else ""
        if not path:
            near = [start for start in blocks if start > last] or [index]
            index = min(near, key=lambda start: abs(start - index))
            path = blocks.get(index, graph.ops[index].module)
            inside = next(o.module or o.name for o in graph.ops if stage_of[o.name] == number)
            lost.append(Remark(f"cut before stage {number}", f"inside a block, at {inside}", f"before {path}"))
        found.append(path)
        last = index
    return tuple(found)


def _crossing(graph: Graph, number: int, stage_of: Mapping[str, int]) -> int:
    """How many tensors with gradients stages before a border make and stages behind it read."""
    made = {
        out for op in graph.ops if stage_of[op.name] < number for out in op.outputs if out and graph.tensors[out].grad
    }
    return len(made & {name for op in graph.ops if stage_of[op.name] >= number for name in op.inputs})


def _begins(graph: Graph, index: int, number: int, stage_of: Mapping[str, int]) -> str:
    """The outermost of the modules around an operator that begins with it."""
    parts = graph.ops[index].module.split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join(parts[:length])
        span = span_of(graph, path)
        if span.start == index and all(stage_of[graph.ops[i].name] >= number for i in span):
            return path
    return ""


def _length(graph: Graph) -> int | None:
    shapes = [graph.tensors[leaf.tensor] for leaf in graph.inputs if leaf.tensor]
    tokens = [t.shape for t in shapes if len(t.shape) == 2 and "int" in t.dtype]
    return tokens[0][1] if tokens else None


def _precision(graph: Graph) -> str:
    """The dtype of most bytes of parameters, where a configuration has a word for it."""
    bytes_of = Counter[str]()
    for parameter in graph.parameters:
        bytes_of[graph.tensors[parameter.tensor].dtype] += graph.tensors[parameter.tensor].bytes
    common = max(bytes_of, key=lambda name: bytes_of[name]) if bytes_of else "float32"
    return common if common in ("bfloat16", "float16") else "float32"


def _modules(plan: Plan, graph: Graph, axes: list[_Axis]) -> tuple[tuple[str, str], ...]:
    """Weights that lie cut on the tensor axis, as patterns of their modules, in the model's order."""
    names = {axis.name for axis in axes if axis.role == TENSOR}
    found: dict[str, str] = {}
    for stage in plan.stages:
        places = [place for place, (name, _) in enumerate(stage.strategy.axes) if name in names]
        for parameter in graph.parameters:
            layout: Any = stage.strategy.resting.get(parameter.tensor, ())
            dims = {layout[place].dim for place in places if layout and isinstance(layout[place], Shard)}
            if len(dims) == 1 and len(graph.tensors[parameter.tensor].shape) == 2:
                way = COLUMNS if dims == {0} else ROWS
                for path in parameter.paths:
                    found.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", path.rpartition(".")[0]), way)
    return tuple(found.items())


def named(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - NAMED
    return ", ".join(distinct[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _mesh_text(axes: Iterable[_Axis]) -> str:
    return " × ".join(f"{a.role} {a.size}" for a in axes) or "one device"
