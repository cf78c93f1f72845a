"""What a ``parallelize.py`` has to know of a model: its blocks, where weights lie on the tensor axis, where stages begin.

All of it is read off a plan and the graph it was made for; modules are named by pattern, ``*`` standing for a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.distributed.tensor import Shard

from shardwright.exchange.configuration import NOTHING, Configuration, ConfigurationError, Remark
from shardwright.exchange.hugging_face import COLUMNS
from shardwright.exchange.recognising import CONTEXT, TENSOR, axes_of, named, role_of
from shardwright.graph import Graph, Op
from shardwright.graph.repeats import block_paths, span_of
from shardwright.operators import record
from shardwright.planner import describe_graph
from shardwright.plans import Plan
from shardwright.search.strategies import Described

Tied = tuple[tuple[int, str], tuple[int, str]]
"""A parameter in two stages: of each its number, and the parameter's name there."""

LINEAR, EMBEDDING = "Linear", "Embedding"

COLWISE, ROWWISE, SEQUENCE = "ColwiseParallel", "RowwiseParallel", "SequenceParallel"


@dataclass(frozen=True)
class Facts:
    """Of a plan and its model.

    ``blocks`` and ``recomputed`` are patterns of modules. ``styles``: patterns of modules and the style of
    ``parallelize_module`` that cuts each; ``placed``: patterns of parameters of other modules and the dim they are cut
    at; ``gathered``: norms behind which the sequence is put together again, cut at ``sequence_dim``. ``cuts``: modules
    before which stages begin; ``stages``: of every stage its first block and the one behind its last; ``others``:
    modules outside the blocks and the stages that read them; ``hidden``: the shape of what crosses between stages, of
    one micro-batch; ``tied``: parameters that two stages hold. ``ties``: some parameter has several names; ``unread``:
    some parameter is never read.
    """

    blocks: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    styles: tuple[tuple[str, str], ...] = ()
    placed: tuple[tuple[str, int], ...] = ()
    gathered: tuple[str, ...] = ()
    sequence_dim: int = 1
    cuts: tuple[str, ...] = ()
    stages: tuple[tuple[int, int], ...] = ()
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    hidden: tuple[int, ...] = ()
    tied: tuple[Tied, ...] = ()
    ties: bool = False
    unread: bool = False


def pattern(path: str, blocks: Sequence[str] = ()) -> str:
    """A path with the number of its block left open, or all its numbers where no ``blocks`` are given: that is how
    configurations call modules.

    >>> pattern("layers.3.norm"), pattern("layers.3.mixer.0", ["layers.3"]), pattern("head.0", ["layers.3"])
    ('layers.*.norm', 'layers.*.mixer.0', 'head.0')
    """
    if not blocks:
        return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", path)
    block = next((block for block in blocks if f"{path}.".startswith(f"{block}.")), None)
    return path if block is None else f"{block.rpartition('.')[0]}.*{path[len(block) :]}".lstrip(".")


def facts_of(plan: Plan, graph: Graph, c: Configuration) -> tuple[Facts, tuple[Remark, ...]]:
    """What the code for a configuration of a plan has to know, and what of the plan the code does otherwise.

    Raises
    ------
    ConfigurationError
        When the stages of a pipeline cannot be cut between blocks of plain modules.
    """
    lost: list[Remark] = []
    blocks = _blocks(graph)
    shared = tuple(p for p in graph.parameters if len(p.paths) > 1)
    read = {name for op in graph.ops for name in op.inputs}
    found: dict[str, object] = {
        "blocks": tuple(dict.fromkeys(map(pattern, blocks))),
        "recomputed": _recomputed(plan, blocks, c),
        "ties": bool(shared),
        "unread": any(p.trainable and p.tensor not in read for p in graph.parameters),
    }
    if (c.tensor or 1) > 1:
        found |= _features(plan, graph, c, blocks, lost)
    if c.pipeline > 1:
        found |= _stages(graph, c, blocks, lost)
    if graph.mutations:
        names = [b.path for b in graph.buffers if b.tensor in dict(graph.mutations)]
        lost.append(Remark("buffers", f"of all rows: {named(names)}", "of every rank's rows for itself"))
    return Facts(**found), tuple(lost)  # type: ignore[arg-type]  # the fields' own types, gathered above


def _blocks(graph: Graph) -> tuple[str, ...]:
    """The repeated blocks in the order of their numbers, with those of the same name that are not alike (a first layer
    without experts)."""
    kinds = dict.fromkeys(map(pattern, block_paths(graph)))
    found: dict[str, None] = {}
    for op in graph.ops:
        parts = op.module.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if pattern(path) in kinds:
                found[path] = None
    return tuple(sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in path.split(".")]))


def _recomputed(plan: Plan, blocks: Sequence[str], c: Configuration) -> tuple[str, ...]:
    if c.recompute == NOTHING:
        return ()
    paths = [path for stage in plan.stages for path in stage.strategy.recomputed]
    every = set(blocks) <= set(paths)
    return tuple(dict.fromkeys(pattern(path) if every else path for path in paths))


def _features(
    plan: Plan, graph: Graph, c: Configuration, blocks: Sequence[str], lost: list[Remark]
) -> dict[str, object]:
    """How weights and norms lie on the tensor axis."""
    ways = dict(c.modules)
    short = {op.module: pattern(op.module, blocks or ("-",)) for op in graph.ops}
    styles, placed = _styles(graph, ways, blocks)
    described = describe_graph(graph)
    norms: dict[str, int] = {}
    uncut: list[str] = []
    for stage in plan.stages:
        axes = [a.name for a in axes_of(stage, described, [], "") if a.role == TENSOR]
        places = [place for place, (name, _) in enumerate(stage.strategy.axes) if name in axes]
        for parameter in graph.parameters:
            layout = stage.strategy.resting.get(parameter.tensor, ())
            dims = {one.dim for one in (layout[place] for place in places if layout) if isinstance(one, Shard)}
            way = ways.get(pattern(parameter.paths[0].rpartition(".")[0]))
            flat = len(graph.tensors[parameter.tensor].shape) == 1
            if dims and (way is None or len(dims) > 1 or (not flat and dims != {0 if way == COLUMNS else 1})):
                uncut.append(parameter.paths[0])
        if c.sequence:
            cut = _norms(graph, set(stage.operators), stage.strategy.splits, places, described)
            norms |= {short[module]: dim for module, dim in cut.items()}
    if uncut:
        lost.append(Remark("weights cut by features", named(uncut), "as those of the same name, or whole"))
    columns = {module for module, style in styles.items() if style == COLWISE}
    gathered = [
        short[op.module]
        for op in graph.ops
        if short[op.module] in norms
        if any(short[reader.module] in columns for out in op.outputs if out for reader in graph.consumers[out])
    ]
    return {
        "styles": (*styles.items(), *((name, SEQUENCE) for name in norms)),
        "placed": tuple(placed.items()),
        "gathered": tuple(dict.fromkeys(gathered)),
        "sequence_dim": next(iter(norms.values()), 1),
    }


def _styles(graph: Graph, ways: Mapping[str, str], blocks: Sequence[str]) -> tuple[dict[str, str], dict[str, int]]:
    """The styles of modules that are cut, by what reads their weights (rows of an embedding are columns of a product),
    and the dims of those that no style is for."""
    styles: dict[str, str] = {}
    placed: dict[str, int] = {}
    for parameter in graph.parameters:
        module = pattern(parameter.paths[0].rpartition(".")[0])
        if module not in ways or len(graph.tensors[parameter.tensor].shape) != 2:
            continue
        first, readers = ways[module] == COLUMNS, graph.consumers[parameter.tensor]
        for path in parameter.paths:
            home = path.rpartition(".")[0]
            classes = {record(op.target).module for op in readers if op.module == home}
            if path.endswith(".weight") and classes in ({LINEAR}, {EMBEDDING}):
                styles[pattern(home, blocks or ("-",))] = COLWISE if first == (classes == {LINEAR}) else ROWWISE
            else:
                placed[pattern(path, blocks or ("-",))] = 0 if first else 1
    return styles, placed


def _norms(
    graph: Graph, own: set[str], splits: Mapping[str, Sequence[str | None]], places: Iterable[int], described: Described
) -> dict[str, int]:
    """Modules that are one norm, which the plan cuts along the sequence, with the dim of their output that is cut."""
    found: dict[str, int] = {}
    for op in graph.ops:
        if op.name not in own or record(op.target).kind != "normalisation" or not _alone(graph, op):
            continue
        for place in places:
            loop = splits[op.name][place] if op.name in splits else None
            if loop is not None and role_of(op, loop, described) == CONTEXT:
                layout = described.rules[op.name].by_name[loop].outputs[0]
                if isinstance(layout, Shard):
                    found[op.module] = layout.dim
    return found


def _alone(graph: Graph, op: Op) -> bool:
    """Whether a module does this operator and nothing else."""
    return bool(op.module) and len(span_of(graph, op.module)) == 1


def _stages(graph: Graph, c: Configuration, blocks: Sequence[str], lost: list[Remark]) -> dict[str, object]:
    """Which blocks every stage has, and which modules outside them."""
    if len(dict.fromkeys(map(pattern, blocks))) != 1:
        what = "no repeated blocks" if not blocks else "several lists of blocks"
        raise ConfigurationError(
            f"The model has {what}, and stages of plain modules are cut between the blocks of one list.",
            "Plan without a pipeline (--stages 1), or export to an engine that has the model.",
        )
    cuts = c.cuts or tuple(blocks[round(number * len(blocks) / c.stages)] for number in range(1, c.stages))
    starts = [span_of(graph, path).start for path in cuts]
    for path, start in zip(cuts, starts, strict=True):
        _check_crossing(graph, path, start, blocks)
    bounds = [0, *(sum(span_of(graph, block).start < start for block in blocks) for start in starts), len(blocks)]
    for path in cuts:
        inside = [block for block in blocks if path.startswith(f"{block}.")]
        if inside:
            raise ConfigurationError(
                f"A stage begins at {path}, inside the block {inside[0]}.", f"Plan with --cut {inside[0]}."
            )
    others, tied = _outside(graph, blocks, bounds, starts)
    kept = _kept(graph, others, c.stages)
    if kept:
        said = f"in one stage: {named(kept)} ({sum(kept.values()):,} bytes)"
        lost.append(Remark("modules before the blocks", said, "in every later stage too, which runs them for nothing"))
    shapes = {_crossing(graph, start)[0] for start in starts}
    if len(shapes) > 1:
        raise ConfigurationError("What crosses between stages has several shapes.", "Plan with --stages 1.")
    (shape,) = shapes
    rows = shape[0] // ((c.microbatches or 1) * c.data)
    return {
        "cuts": cuts,
        "stages": tuple(pairwise(bounds)),
        "others": tuple((name, tuple(sorted(stages))) for name, stages in others.items()),
        "hidden": (rows, *shape[1:]),
        "tied": tied,
    }


def _outside(
    graph: Graph, blocks: Sequence[str], bounds: Sequence[int], starts: Sequence[int]
) -> tuple[dict[str, set[int]], tuple[Tied, ...]]:
    """The modules outside the blocks with the stages that read them, and parameters that two stages read."""
    stage_of = [sum(start <= index for start in starts) for index in range(len(graph.ops))]
    for number, (first, last) in enumerate(pairwise(bounds)):
        for block in blocks[first:last]:
            for index in span_of(graph, block):
                stage_of[index] = number
    others: dict[str, set[int]] = {}
    tied: list[Tied] = []
    for parameter in graph.parameters:
        readers = [(op.module, stage_of[index]) for index, op in enumerate(graph.ops) if parameter.tensor in op.inputs]
        names: dict[int, str] = {}
        for path in parameter.paths:
            if any(path.startswith(f"{block}.") for block in blocks):
                continue
            module = _outermost(path, blocks)
            inside = {number for where, number in readers if f"{where}.".startswith(f"{module}.")}
            stages = inside or {number for _, number in readers} or {0}
            others.setdefault(module, set()).update(stages)
            names |= dict.fromkeys(stages, path)
        if len(names) > 2:
            raise ConfigurationError(f"{parameter.paths[0]} is read in {len(names)} stages.", "Plan with --stages 2.")
        if len(names) == 2 and parameter.trainable:
            first, second = sorted(names)
            tied.append(((first, names[first]), (second, names[second])))
    return others, tuple(tied)


def _kept(graph: Graph, others: Mapping[str, set[int]], stages: int) -> dict[str, int]:
    """Parameters (and their bytes) of modules before the blocks that later stages hold besides: all but embeddings, in
    whose place something of the same shape can stand."""
    return {
        p.paths[0]: graph.tensors[p.tensor].bytes
        for p in graph.parameters
        for module, where in others.items()
        if p.paths[0].startswith(f"{module}.") and max(where) < stages - 1
        if not any(record(op.target).module == EMBEDDING for op in graph.consumers[p.tensor])
    }


def _outermost(path: str, blocks: Sequence[str]) -> str:
    """The outermost module around a parameter that has no blocks in it."""
    parts = path.split(".")[:-1]
    for length in range(1, len(parts)):
        module = ".".join(parts[:length])
        if not any(f"{block}.".startswith(f"{module}.") for block in blocks):
            return module
    return ".".join(parts)


def _crossing(graph: Graph, start: int) -> list[tuple[int, ...]]:
    """The shapes of what operators before an index make, with gradients, and operators behind it read."""
    made = {out for op in graph.ops[:start] for out in op.outputs if out and graph.tensors[out].grad}
    read = dict.fromkeys(name for op in graph.ops[start:] for name in op.inputs if name in made)
    return [graph.tensors[name].shape for name in read]


def _check_crossing(graph: Graph, path: str, start: int, blocks: Sequence[str]) -> None:
    """One tensor crosses a cut, and nothing else that skipped blocks made is read behind it."""
    crossing = _crossing(graph, start)
    skipped = {index for block in blocks for index in span_of(graph, block) if index < start}
    made = {out for i in skipped for out in graph.ops[i].outputs if out is not None and not graph.tensors[out].grad}
    also = {name for op in graph.ops[start:] for name in op.inputs if name in made}
    if len(crossing) != 1 or also:
        raise ConfigurationError(
            f"{len(crossing) + len(also)} tensors cross into the stage that begins at {path}, and stages of plain modules "
            "hand over one.",
            "Plan with --cut at another block, or with --stages 1.",
        )
