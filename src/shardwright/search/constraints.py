"""What a user insists on: pinned layouts of parameters, pinned splits of operators, axes that must not cut something.

Names are shell patterns, matched against a parameter's paths or an operator's name and module path:

- ``blocks.*.feed.up.weight=S0,R`` pins a parameter's resting layout, one placement per mesh axis;
- ``blocks.0.attention.query=i0,none`` pins the split of every operator of that module, one loop per mesh axis;
- ``lm_head*@node`` forbids the axis ``node`` to cut whatever matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import ShardwrightError
from shardwright.graph import Graph, Op, Tensor
from shardwright.operators.rules import Layout, LoopRule, Split
from shardwright.search.options import Restriction


def constraints(
    graph: Graph, axes: Sequence[tuple[str, int]], pins: Sequence[str], forbidden: Sequence[str]
) -> Restriction:
    """The part of the space that honours every pin and every prohibition."""
    result = Restriction("constrained")
    for text in pins:
        result = result & _pin(graph, axes, text)
    for text in forbidden:
        result = result & _forbid(graph, axes, text)
    return result


def _matches_op(pattern: str, op: Op) -> bool:
    return fnmatchcase(op.name, pattern) or fnmatchcase(op.module, pattern)


def _matches_parameter(graph: Graph, pattern: str, tensor: Tensor) -> bool:
    parameter = graph.parameter_of.get(tensor.name)
    return parameter is not None and any(fnmatchcase(path, pattern) for path in parameter.paths)


def _hits(graph: Graph, pattern: str) -> tuple[bool, bool]:
    """Whether a pattern matches some parameter, and some operator."""
    parameters = any(_matches_parameter(graph, pattern, graph.tensors[p.tensor]) for p in graph.parameters)
    return parameters, any(_matches_op(pattern, op) for op in graph.ops)


def _pin(graph: Graph, axes: Sequence[tuple[str, int]], text: str) -> Restriction:
    pattern, _, value = text.rpartition("=")
    parts = [part.strip() for part in value.split(",")]
    if not pattern or len(parts) != len(axes):
        shown = " × ".join(name for name, _ in axes)
        raise ShardwrightError(
            f"The pin {text!r} does not name something and one placement or loop per mesh axis ({shown}).",
            "Write NAME=S0,R for a parameter or NAME=i0,none for an operator.",
        )
    parameters, operators = _hits(graph, pattern)
    if parameters:
        wanted: Layout = tuple(_placement(part, text) for part in parts)
        return Restriction("pin", rest=lambda t, layout: not _matches_parameter(graph, pattern, t) or layout == wanted)
    if operators:
        split: Split = tuple(None if part in ("none", "None", "") else part for part in parts)
        return Restriction("pin", split=lambda op, rules, chosen: not _matches_op(pattern, op) or chosen == split)
    raise ShardwrightError(
        f"The pin {text!r} matches no parameter and no operator.", "See `shardwright explain` for names."
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
    if not any(_hits(graph, pattern)):
        raise ShardwrightError(f"The prohibition {text!r} matches nothing.", "See `shardwright explain` for names.")
    axis = names.index(axis_name)

    def loop(op: Op, rule: LoopRule, label: str, at: int) -> bool:
        return at != axis or not _matches_op(pattern, op)

    def rest(tensor: Tensor, layout: Layout) -> bool:
        return isinstance(layout[axis], Replicate | Partial) or not _matches_parameter(graph, pattern, tensor)

    return Restriction("forbid", loop=loop, rest=rest)
