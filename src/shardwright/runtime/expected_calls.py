"""Calls that a plan was made for beside its own, held against the model as it is when they first come.

A plan keeps their graphs (``shardwright.plan(…, also=…)``), by which it has priced them and their memory. What runs is
captured from the live model, never those graphs: the model may have been edited since, and a plan may come from anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from shardwright.graph import Graph, Input, Op, Ref
from shardwright.graph.computation import computation
from shardwright.plans.plan import Signature
from shardwright.runtime.calling import Calling

_log = logging.getLogger("shardwright")


def warn_of_change(expected: Sequence[Graph], graph: Graph, calling: Calling | None) -> None:
    """Say so, once on rank 0, where the plan knows this call and has another graph for it. ``graph``: as captured now."""
    if calling is None:
        return
    now = _as_written(graph, calling)
    known = [one for one in (_as_written(old, calling) for old in expected) if _call(one) == _call(now)]
    if not known or computation(now) in map(computation, known):
        return
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning(
            "The model has changed since the plan was made: a call in %s mode that the plan knows (also=) computes "
            "something else now: %s. It runs as the model is now; its seconds and bytes in the plan are those of before. "
            "Plan again with the same also= to have them anew.",
            "training" if graph.training else "evaluation",
            _difference(known[0], now),
        )


def _as_written(graph: Graph, calling: Calling) -> Graph:
    """The same graph whichever way its call was written: arguments by name, those that say nothing left out."""
    named = [replace(entry, path=calling.argument(entry.path)) for entry in graph.inputs]
    said = [entry for entry in named if not _idle(entry, calling)]
    return replace(graph, inputs=tuple(sorted(said, key=lambda entry: entry.path)), input_tree="")


def _idle(entry: Input, calling: Calling) -> bool:
    return (
        entry.tensor is None
        and entry.path in calling.defaults
        and type(calling.defaults[entry.path]) is type(entry.value)
        and calling.defaults[entry.path] == entry.value
    )


def _call(graph: Graph) -> tuple[Any, ...]:
    tensors = graph.tensors
    given = [
        (e.path, repr(e.value) if e.tensor is None else (tensors[e.tensor].dtype, tensors[e.tensor].shape))
        for e in graph.inputs
    ]
    return graph.training, given


def _difference(old: Graph, new: Graph) -> str:
    """The first operator that differs, as a clause; else whatever else does."""
    for before, now in zip_longest(old.ops, new.ops):
        if before is None or now is None or _about(before) != _about(now):
            there, here = (_described(op) for op in (before, now))
            return f"{here} instead of {there}"
    return Signature.of(old).difference(Signature.of(new))


def _about(op: Op) -> tuple[Any, ...]:
    return op.target, _plain(op.args), tuple((key, _plain(value)) for key, value in op.kwargs), op.grad


def _plain(value: Any) -> Any:
    """A value without the names of tensors, which differ with the way in which a call is written."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return Ref if isinstance(value, Ref) else value


def _described(op: Op | None) -> str:
    if op is None:
        return "nothing"
    numbers = [repr(value) for value in (*op.args, *dict(op.kwargs).values()) if isinstance(value, int | float | str)]
    where = f" at {op.source}" if op.source else ""
    return f"{op.short}({', '.join(numbers)}){where}"
