"""A configuration as a plan of ours: degrees become the axes of a mesh, and what each axis may cut follows from its degree.

Every degree is a restriction of the one search space (as recipes are, :mod:`shardwright.search.baselines`): rows of the
batch on ``replicate`` and ``shard``, positions on ``context``, features on ``tensor``, experts where the file asks for
them. The best strategy under it is what an engine that follows the file could do at most: which operator is cut how is
left to the search, except where the file says so itself (a ``tp_plan``). Inside a node all links are alike, so degrees
stand there in the order of their size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from shardwright.cluster import Cluster, Mesh, mesh_of, part_of
from shardwright.errors import Infeasible
from shardwright.exchange.configuration import (
    DEGREES,
    LIGHT,
    NOTHING,
    OPTIMIZER,
    PARAMETERS,
    Configuration,
    ConfigurationError,
    Remark,
)
from shardwright.exchange.hugging_face import COLUMNS, ROWS
from shardwright.exchange.recognising import EXPERT, parameter_behind, role_of
from shardwright.graph import Graph, Op, Tensor
from shardwright.graph.repeats import block_paths, span_of
from shardwright.operators import record
from shardwright.operators.rules import Layout, LoopRule
from shardwright.operators.strategy import Strategy
from shardwright.planner import Options, Progress, describe_graph
from shardwright.planner.cutting import Line, Named, complete
from shardwright.planner.delivering import deliver
from shardwright.planner.proposals import UNPROVED, Laid, LaidOut
from shardwright.plans import Plan, Prediction, Stage
from shardwright.plans.layouts import layout_text
from shardwright.program.binding import completed
from shardwright.program.mean_losses import origin
from shardwright.program.microbatches import batch_of, microbatches
from shardwright.program.stages import stage_graphs
from shardwright.program.transfers import unreduced_layout
from shardwright.schedules import known_schedule
from shardwright.search.conditions import Conditions
from shardwright.search.constraints import constraints
from shardwright.search.formulate import Described
from shardwright.search.joint.cuts import cut_into
from shardwright.search.options import Restriction
from shardwright.search.strategies import find_strategy, state

REPLICATE, SHARD, CONTEXT, TENSOR = DEGREES
PRODUCTS = ("matmul", "attention")
"""Kinds of operators that tensor parallelism cuts by features."""


@dataclass(frozen=True)
class Followed:
    """The plan that a configuration is, with every degree settled, and what of it the plan does otherwise."""

    plan: Plan
    configuration: Configuration
    remarks: tuple[Remark, ...]


def plan_like(
    graph: Graph,
    cluster: Cluster,
    configuration: Configuration,
    options: Options | None = None,
    *,
    progress: Progress | None = None,
    reference: str = "",
) -> Followed:
    """Another engine's configuration as a plan for a captured graph; whether it fits is in its prediction.

    Parameters
    ----------
    graph
        Of one step, with all its rows: a configuration that says another batch is followed in its degrees and passes.
    configuration
        As it was read (:func:`~shardwright.exchange.read_configuration`).

    Raises
    ------
    ConfigurationError
        When its degrees do not make these devices, its rows no whole micro-batches, or the model cannot be cut so.

    Example
    -------
    >>> plan_like(graph, parse_cluster("8xH100"), configuration).plan.prediction.fits            # doctest: +SKIP
    """
    say, options = progress or (lambda text: None), options or Options()
    settled = configuration.on(cluster.size, batch_of(graph))
    follow = _Follow(graph, cluster, settled, options, say)
    proposal = follow.proposal()
    say(f"{settled.engine}: simulating")
    return Followed(deliver(graph, cluster, follow.options, proposal, reference), settled, tuple(follow.remarks))


def laid_like(graph: Graph, cluster: Cluster, configuration: Configuration, options: Options | None = None) -> Laid:
    """The stages and the order of passes of that plan alone, neither checked nor simulated: for those who ask about many.

    >>> len(laid_like(graph, parse_cluster("8xH100"), configuration).stages)                     # doctest: +SKIP
    1
    """
    settled = configuration.on(cluster.size, batch_of(graph))
    return _Follow(graph, cluster, settled, options or Options(), lambda text: None).proposal().laid()


def rows_asked(c: Configuration, devices: int) -> int | None:
    """Rows of a step on so many devices, where the file says anything about them.

    >>> rows_asked(Configuration("torchtitan", shard=None, microbatch=2), 8)
    16
    """
    return None if c.microbatch is None and c.batch is None else c.on(devices).batch


class _Follow:
    """One configuration on one cluster."""

    def __init__(self, graph: Graph, cluster: Cluster, c: Configuration, options: Options, say: Progress) -> None:
        self.graph, self.cluster, self.c, self.say = graph, cluster, c, say
        self.options = replace(options, optimizer=c.optimizer)
        self.remarks: list[Remark] = []
        self.known: dict[str, str] = {}
        whole = describe_graph(graph)
        self.labels, self.blocks = whole.labels, whole.blocks

    def proposal(self) -> LaidOut:
        """The stages, each split as is best under its degrees, and the order of their passes."""
        c = self.c
        count, stages, devices = c.microbatches or 1, c.stages, c.pipeline
        each = self.cluster.size // devices
        micro = microbatches(self.graph, count, self.options.batch_norm)
        smallest = micro.graphs[micro.sizes[-1]]
        order = known_schedule(c.schedule, stages, count, devices)
        if micro.tail is not None:
            order = order.forwards_first()
        if stages == 1:
            names = [[op.name for op in self.graph.ops]]
        else:
            names = complete(self.graph, self._cut(smallest, stages))
        parts, made = [*stage_graphs(smallest, names)], list[Stage]()
        for number, part in enumerate(parts):
            first = order.device_of[number] * each
            ranks = tuple(range(first, first + each))
            self.say(f"{c.engine}: stage {number + 1} of {stages}")
            # What crosses a border arrives as the stage that makes it leaves it: each rank has its own rows of it.
            arrives = {
                name: completed(unreduced_layout(name, parts[maker].graph, made[maker].strategy))
                for name, maker in part.received.items()
            }
            strategy = self._strategy(part.graph, part_of(self.cluster, ranks), arrives)
            made.append(Stage(tuple(names[number]), ranks, strategy))
        nothing = Prediction(0.0, 0.0, 0.0, 0.0, 0.0, True)
        shape = (("stage", stages), *made[0].strategy.axes) if stages > 1 else made[0].strategy.axes
        return LaidOut(name=c.engine, shape=shape, expected=nothing, proof=UNPROVED, layout=Laid(tuple(made), order))

    def _cut(self, smallest: Graph, stages: int) -> Sequence[Sequence[str]]:
        """The operators of every stage: cut before the named modules, else as many blocks in each, else as is fastest."""
        blocks = block_paths(self.graph)
        paths: list[str] = [_own_name(name, self.graph, blocks) for name in self.c.cuts]
        if not paths and len(blocks) >= stages:
            paths = [blocks[round(number * len(blocks) / stages)] for number in range(1, stages)]
        if paths:
            return cut_into(Named.of(self.graph, paths), stages)
        alone = mesh_of(part_of(self.cluster, [0]))
        return cut_into(Line.of(smallest, alone, self.cluster), stages)

    def _strategy(self, graph: Graph, devices: Cluster, arrives: Mapping[str, Layout]) -> Strategy:
        """The best split of one stage that the degrees allow; ``arrives``: how what other stages make lies when it comes."""
        c, described = self.c, self._described(graph)
        mesh, roles = mesh_and_roles(devices, c)
        restriction = replace(restricted(c, roles, described), arrives=arrives)
        experts = self._experts(described, roles, mesh)
        if experts:
            restriction = restriction & experts
        held = {p.paths[0] for p in graph.parameters}
        pins = [f"{path}={layout}" for path, layout in self.known.items() if path in held]
        if pins:
            restriction = restriction & constraints(graph, mesh.names, pins, ())
        again = self._recomputed(described)
        conditions, light = Conditions(time_limit=self.options.time_limit, gap=0.0), c.recompute == LIGHT
        try:
            stated = state(described, mesh, optimizer=c.optimizer, recompute=again, lightly=light, within=restriction)
            found = find_strategy(described, mesh, "auto", conditions, within=restriction, stated=stated)
        except Infeasible as error:
            raise ConfigurationError(
                f"{c.source or c.engine} cannot be followed with this model: {error.message}", error.remedy
            ) from None
        strategy = found.strategy
        self.known |= {p.paths[0]: ",".join(layout_text(strategy.resting[p.tensor])) for p in graph.parameters}
        return strategy

    def _described(self, graph: Graph) -> Described:
        """A stage with the labels of the whole model: what reaches it from the stage before has none of its own."""
        own = describe_graph(graph)
        labels = {op.name: self.labels.get(origin(op.name), own.labels[op.name]) for op in graph.ops}
        return replace(own, labels=labels, known={})

    def _recomputed(self, described: Described) -> tuple[str, ...]:
        if self.c.recompute == NOTHING:
            return ()
        # Of the whole model: a stage of one block has nothing in it that repeats.
        blocks = [path for path in self.blocks if span_of(described.graph, path)]
        if not self.blocks:
            self._remark("recompute", self.c.recompute, "nothing: the model has no repeated blocks")
        return tuple(blocks[: math.ceil(self.c.recomputed_share * len(blocks))])

    def _experts(self, described: Described, roles: Sequence[str], mesh: Mesh) -> Restriction | None:
        """Experts on the innermost axes that share the batch, as far as these multiply to the degree."""
        graph = described.graph
        if self.c.expert == 1:
            return None
        chosen, size = list[int](), 1
        for axis in reversed(range(len(roles))):
            if roles[axis] in (SHARD, REPLICATE) and self.c.expert % (size * mesh.sizes[axis]) == 0:
                chosen.append(axis)
                size *= mesh.sizes[axis]
        stacked = {p.tensor for p in graph.parameters if len(graph.tensors[p.tensor].shape) == 3}
        if size != self.c.expert or not stacked:
            why = "the model holds no experts as one tensor" if not stacked else f"no axes make {self.c.expert}"
            self._remark("expert", str(self.c.expert), f"experts whole on every rank: {why}")
            return None

        def rest(tensor: Tensor, layout: Layout) -> bool:
            return tensor.name not in stacked or all(layout[axis] == Shard(0) for axis in chosen)

        def loop(op: Op, rule: LoopRule, label: str, axis: int) -> bool:
            own = axis in chosen and any(parameter_behind(graph, name) in stacked for name in op.inputs)
            return not own or role_of(op, rule.name, described) == EXPERT

        return Restriction("experts", loop, rest)

    def _remark(self, key: str, value: str, why: str) -> None:
        remark = Remark(key, value, why)
        if remark not in self.remarks:
            self.remarks.append(remark)


def mesh_and_roles(devices: Cluster, c: Configuration) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh that has an axis for every degree above one (two where a degree goes across nodes), and the degree of each.

    Examples
    --------
    >>> from shardwright.cluster import parse_cluster
    >>> mesh, roles = mesh_and_roles(parse_cluster("2x8xH100"), Configuration("megatron", shard=8, tensor=2))
    >>> mesh.sizes, roles
    ((2, 2, 4), ('shard', 'tensor', 'shard'))
    """
    inside = devices.nodes[0].devices
    within: list[tuple[int, str]] = []
    across: list[tuple[int, str]] = []
    for name in reversed(DEGREES):
        size = getattr(c, name) or 1
        near = math.gcd(size, inside)
        inside //= near
        within += [(near, name)] if near > 1 else []
        across += [(size // near, name)] if size > near else []
    axes = [*sorted(across), *sorted(within)]
    sizes_of = tuple(size for size, _ in axes)
    mesh = mesh_of(devices, sizes_of) if axes else mesh_of(devices)
    return mesh, tuple(name for _, name in axes) or (REPLICATE,)


def restricted(c: Configuration, roles: Sequence[str], described: Described) -> Restriction:
    """What a configuration leaves to the search on a mesh whose axes have these roles."""
    shards = (c.shard or 1) > 1
    gathers = tuple(role == SHARD or (role == CONTEXT and shards) for role in roles)
    labels, tensor = described.labels, TENSOR in roles
    weights = _told(c, described.graph)

    def loop(op: Op, rule: LoopRule, label: str, axis: int) -> bool:
        role = roles[axis]
        if role == TENSOR:
            between = c.sequence and label == "sequence" and record(op.target).kind not in PRODUCTS
            return (label == "" and not _statistic(rule)) or between
        if role == CONTEXT:
            known = labels[op.name].values()
            return label == "sequence" or not rule.divides or ("sequence" not in known and label == "batch")
        apart = c.expert > 1 and label == ""
        if apart and record(op.target).kind in PRODUCTS:
            apart = role_of(op, rule.name, described) == EXPERT
        return label == "batch" or not rule.divides or apart

    def rest(parameter: Tensor, layout: Layout) -> bool:
        for role, gathered, placement in zip(roles, gathers, layout, strict=True):
            if role == TENSOR:
                if weights and placement != weights.get(parameter.name, Replicate()):
                    return False
            elif gathered != isinstance(placement, Shard):
                return False
        return True

    def cut(op: Op, axis: int) -> bool:
        if roles[axis] == TENSOR:
            return not weights if record(op.target).kind in PRODUCTS else c.sequence
        return roles[axis] != CONTEXT or "sequence" in labels[op.name].values()

    kept = not c.reshard or c.sharding != PARAMETERS
    return Restriction(
        c.engine,
        loop,
        rest,
        gather=lambda axis: roles[axis] != TENSOR,
        regather=not (shards and kept),
        whole_gradients=shards and c.sharding == OPTIMIZER,
        cut=cut,
        together=shards and not tensor,
    )


def _statistic(rule: LoopRule) -> bool:
    """Whether ranks that share this loop add up a row's statistics, as in the features of a norm: no engine cuts it there,
    each rank has whole rows, of all positions or of its own. A softmax asks for a maximum too, and is cut by words."""
    return bool(rule.exchanges) and all(exchange.reduce == "sum" for exchange in rule.exchanges)


def _told(c: Configuration, graph: Graph) -> Mapping[str, Any]:
    """How weights lie on the tensor axis where the file says so: a bias that belongs to columns is cut with them."""
    if not c.modules or (c.tensor or 1) == 1:
        return {}
    found: dict[str, Any] = {}
    for parameter in graph.parameters:
        for path in parameter.paths:
            module = path.rpartition(".")[0]
            way = next((w for p, w in c.modules if fnmatchcase(module, p) or fnmatchcase(module, f"*.{p}")), "")
            flat = len(graph.tensors[parameter.tensor].shape) == 1
            if way == COLUMNS:
                found[parameter.tensor] = Shard(0)
            elif way == ROWS and not flat:
                found[parameter.tensor] = Shard(1)
    if not found:
        patterns = ", ".join(pattern for pattern, _ in c.modules[:3])
        raise ConfigurationError(
            f"No module of the model is called as in {c.source or c.engine}: {patterns}, …",
            "Is the file for this model?",
        )
    return found


def _own_name(name: str, graph: Graph, blocks: Sequence[str]) -> str:
    """The module that a file means: by its name, at any depth, or the block of that number."""
    modules = {op.module for op in graph.ops}
    own = next((m for m in sorted(modules) if m == name or m.startswith(f"{name}.")), None)
    if own is not None:
        return name
    inside = re.compile(rf"(^|.*\.){re.escape(name)}(\.|$)")
    deeper = next((m for m in sorted(modules) if inside.match(m)), None)
    if deeper is not None:
        return deeper[: inside.match(deeper).end()].rstrip(".")  # type: ignore[union-attr]  # it matched above
    number = re.search(r"(\d+)$", name)
    if number and int(number[1]) < len(blocks):
        return blocks[int(number[1])]
    raise ConfigurationError(
        f"A stage is to begin at {name}, and the model has no such module.",
        f"Its blocks are {', '.join(blocks[:2])}, …" if blocks else "Name modules as in model.named_modules().",
    )
