"""What a user insists on: pinned layouts of parameters and inputs, pinned splits of operators, axes that must not cut.

Names are shell patterns, matched against a parameter's paths, an input's name, or an operator's name and module path:

- ``blocks.*.feed.up.weight=S0,R`` pins a parameter's resting layout, one placement per mesh axis;
- ``tokens=S0,R`` pins how an input arrives (a ``DTensor`` that lies like this needs no change of layout);
- ``blocks.0.attention.query=i0,none`` pins the split of every operator of that module, one loop per mesh axis;
- ``lm_head*@node`` forbids the axis ``node`` to cut whatever matches.

A pin has one part per mesh axis and a prohibition names an axis, so they also say which meshes are meant
(:func:`meant_meshes`). What is asked of one of several repeated blocks makes the blocks decide by themselves. A search that
takes one axis after the other (:mod:`shardwright.search.recursive`) is asked for the first parts first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.cluster import Mesh
from shardwright.errors import ShardwrightError
from shardwright.graph import Graph, Op, Tensor
from shardwright.graph.repeats import representatives
from shardwright.operators.rules import Layout, LoopRule, Split
from shardwright.search.options import Restriction, layouts_of

_PLACEMENT = re.compile(r"R|S\d+")
NAMES = "See `shardwright explain PLAN` for names."


def meant_meshes(shapes: Sequence[Mesh], pins: Sequence[str], forbidden: Sequence[str]) -> Sequence[Mesh]:
    """The meshes that have as many axes as every pin has parts, and the axes that prohibitions name.

    Raises
    ------
    ShardwrightError
        When no mesh is left, with the meshes there are.
    """
    parts = {text.rpartition("=")[2].count(",") + 1 for text in pins}
    axes = {text.rpartition("@")[2] for text in forbidden}
    kept = [m for m in shapes if parts <= {len(m.names)} and axes <= {name for name, _ in m.names}]
    if not kept:
        there = "; ".join(" × ".join(f"{name} {size}" for name, size in mesh.names) for mesh in shapes)
        asked = ", ".join(repr(text) for text in (*pins, *forbidden))
        raise ShardwrightError(
            f"No mesh of the cluster has the axes that {asked} speak of.",
            f"There are {there}: write one placement or loop per axis, or NAME@AXIS; --max-axes allows more.",
        )
    return kept


def check_asked(graph: Graph, pins: Sequence[str], forbidden: Sequence[str]) -> None:
    """Refuse what matches nothing in a model, whichever way it is going to be planned.

    Raises
    ------
    ShardwrightError
        That names the first pin or prohibition that speaks of nothing there is.
    """
    for what, texts, sign in (("pin", pins, "="), ("prohibition", forbidden, "@")):
        for text in texts:
            if not _matches(graph, text.rpartition(sign)[0]):
                raise ShardwrightError(f"The {what} {text!r} matches no parameter, no input and no operator.", NAMES)


def asked_of(graph: Graph, pins: Sequence[str], forbidden: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The pins and prohibitions that speak of something in this graph: a stage's, of those asked of a whole model."""
    return (
        tuple(text for text in pins if _matches(graph, text.rpartition("=")[0])),
        tuple(text for text in forbidden if _matches(graph, text.rpartition("@")[0])),
    )


def check_uncut(graph: Graph, pins: Sequence[str]) -> None:
    """Refuse pins that ask one device to cut something."""
    for text in asked_of(graph, pins, ())[0]:
        if any(part.strip() not in ("R", "none", "None", "") for part in text.rpartition("=")[2].split(",")):
            raise ShardwrightError(
                f"The pin {text!r} asks for a cut in a stage of one device.", "Plan with fewer stages, or leave it out."
            )


def _matches(graph: Graph, pattern: str) -> bool:
    return bool(
        any(_matches_op(pattern, op) for op in graph.ops)
        or any(i.tensor and fnmatchcase(i.tensor, pattern) for i in graph.inputs)
        or _parameters(graph, pattern)
    )


def constraints(
    graph: Graph, axes: Sequence[tuple[str, int]], pins: Sequence[str], forbidden: Sequence[str]
) -> Restriction:
    """The part of the space that honours every pin and every prohibition."""
    result = Restriction("constrained")
    for text in pins:
        result = result & _pin(graph, axes, text)
    for text in forbidden:
        result = result & _forbid(graph, axes, text)
    sizes = [size for _, size in axes]
    for parameter in graph.parameters if pins else ():
        tensor = graph.tensors[parameter.tensor]
        if not any(result.rest(tensor, layout) for layout in layouts_of(tensor, sizes)):
            raise ShardwrightError(
                f"What is asked of {parameter.paths[0]} contradicts itself: {', '.join((*pins, *forbidden))}.",
                "Leave one of them out.",
            )
    return result


def _matches_op(pattern: str, op: Op) -> bool:
    return fnmatchcase(op.name, pattern) or fnmatchcase(op.module, pattern)


def _matches_parameter(graph: Graph, pattern: str, tensor: Tensor) -> bool:
    parameter = graph.parameter_of.get(tensor.name)
    return parameter is not None and any(fnmatchcase(path, pattern) for path in parameter.paths)


def _parameters(graph: Graph, pattern: str) -> list[Tensor]:
    return [t for p in graph.parameters if _matches_parameter(graph, pattern, t := graph.tensors[p.tensor])]


def _alike(graph: Graph, hit: Callable[[Op], bool]) -> bool:
    """Whether operators of repeated blocks are hit together or not at all, so that they may go on deciding together."""
    by_name = {op.name: op for op in graph.ops}
    return all(hit(by_name[name]) == hit(by_name[first]) for name, first in representatives(graph).items())


def _pin(graph: Graph, axes: Sequence[tuple[str, int]], text: str) -> Restriction:
    pattern, _, value = text.rpartition("=")
    parts = [part.strip() for part in value.split(",")]
    if not pattern or len(parts) != len(axes):
        shown = " × ".join(name for name, _ in axes)
        raise ShardwrightError(
            f"The pin {text!r} does not name something and one placement or loop per mesh axis ({shown}).",
            "Write NAME=S0,R for a parameter or an input, NAME=i0,none for an operator.",
        )
    parameters = _parameters(graph, pattern)
    inputs = [graph.tensors[i.tensor] for i in graph.inputs if i.tensor and fnmatchcase(i.tensor, pattern)]
    operators = any(_matches_op(pattern, op) for op in graph.ops)
    if parameters or (inputs and (not operators or all(_PLACEMENT.fullmatch(part) for part in parts))):
        layout: Layout = tuple(_placement(part, text) for part in parts)
        for tensor in parameters or inputs:
            _check(tensor, layout, [size for _, size in axes], text)
        if not parameters:
            return Restriction("pin", arrives={tensor.name: layout for tensor in inputs})
        pinned = {tensor.name for tensor in parameters}
        return Restriction(
            "pin",
            rest=lambda t, rests: t.name not in pinned or rests == layout[: len(rests)],
            fold=_alike(graph, lambda op: any(name in pinned for name in op.inputs)),
        )
    if operators:
        split: Split = tuple(None if part in ("none", "None", "") else part for part in parts)
        return Restriction(
            "pin",
            split=lambda op, rules, chosen: not _matches_op(pattern, op) or chosen == split[: len(chosen)],
            fold=_alike(graph, lambda op: _matches_op(pattern, op)),
        )
    raise ShardwrightError(f"The pin {text!r} matches no parameter, no input and no operator.", NAMES)


def _check(tensor: Tensor, layout: Layout, sizes: Sequence[int], pin: str) -> None:
    if layout not in layouts_of(tensor, sizes):
        raise ShardwrightError(
            f"The pin {pin!r} would leave a device without a part of {tensor.name}, whose shape is {list(tensor.shape)}.",
            f"Shard a dim that has an element for each of the {' × '.join(map(str, sizes))} devices, or keep it whole (R).",
        )


def _placement(text: str, pin: str) -> Replicate | Shard:
    if text == "R":
        return Replicate()
    if text.startswith("S") and text[1:].isdigit():
        return Shard(int(text[1:]))
    raise ShardwrightError(f"{text!r} in the pin {pin!r} is not a placement.", "Placements are R, S0, S1, …")


def _forbid(graph: Graph, axes: Sequence[tuple[str, int]], text: str) -> Restriction:
    pattern, _, axis_name = text.rpartition("@")
    names = [name for name, _ in axes]
    if not pattern or axis_name not in names:
        raise ShardwrightError(
            f"The prohibition {text!r} does not name something and a mesh axis ({', '.join(names)}).",
            "Write NAME@AXIS, for example 'lm_head*@node'.",
        )
    parameters = {tensor.name for tensor in _parameters(graph, pattern)}
    if not parameters and not any(_matches_op(pattern, op) for op in graph.ops):
        raise ShardwrightError(f"The prohibition {text!r} matches no parameter and no operator.", NAMES)
    axis = names.index(axis_name)

    def loop(op: Op, rule: LoopRule, label: str, at: int) -> bool:
        return at != axis or not _matches_op(pattern, op)

    def rest(tensor: Tensor, layout: Layout) -> bool:
        cut = axis < len(layout) and not isinstance(layout[axis], Replicate | Partial)
        return not cut or tensor.name not in parameters

    def hit(op: Op) -> bool:
        return _matches_op(pattern, op) or any(name in parameters for name in op.inputs)

    return Restriction("forbid", loop=loop, rest=rest, fold=_alike(graph, hit))
