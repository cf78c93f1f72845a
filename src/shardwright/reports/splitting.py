"""How a model is split, as rows of a module tree: operators with what each axis cuts, tensors with their layouts.

Repeated blocks that decide alike are listed once, with how often; where a block differs from the first one it is listed too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.graph import Graph, Op
from shardwright.graph.repeats import representatives
from shardwright.operators.rules import OpRules, Window, input_layouts, largest_shard, output_layouts
from shardwright.plans import Plan
from shardwright.plans.serial import placement_text
from shardwright.reports.cuts import cut_of
from shardwright.search.labels import Labels

NUMBERED = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def split_rows(plan: Plan, graph: Graph, rules: Mapping[str, OpRules], labels: Labels) -> list[dict[str, Any]]:
    """Operators in order, then parameters; each row names its module, so that a tree can be built of them."""
    return [*_operators(plan, graph, rules, labels), *_parameters(plan, graph)]


def standing(plan: Plan, graph: Graph) -> tuple[list[Op], dict[str, int]]:
    """The operators to show (one for all that decide like it) and how many each stands for."""
    first_of, splits = representatives(graph), plan.stages[0].strategy.splits
    times: dict[str, int] = {}
    for name, first in first_of.items():
        shown = first if splits[name] == splits[first] else name
        times[shown] = times.get(shown, 0) + 1
    return [op for op in graph.ops if op.name in times], times


def _operators(plan: Plan, graph: Graph, rules: Mapping[str, OpRules], labels: Labels) -> list[dict[str, Any]]:
    ops, times = standing(plan, graph)
    rows = []
    for op in ops:
        split, known = plan.stages[0].strategy.splits[op.name], rules[op.name]
        needs = input_layouts(known, split, len(op.inputs))
        gives = output_layouts(known, split, len(op.outputs))
        rows.append(
            {
                "row": "operator",
                "module": op.module,
                "name": op.name,
                "target": op.short,
                "source": op.source,
                "times": times[op.name],
                "cuts": [cut_of(loop, known, labels.get(op.name, {})) for loop in split],
                "loops": list(split),
                "origin": known.origin,
                "minor": known.kind in ("view", "creation"),
                "reads": [_tensor(graph, name, need) for name, need in zip(op.inputs, needs, strict=True)],
                "makes": [
                    _tensor(graph, n, layout) for n, layout in zip(op.outputs, gives, strict=True) if n is not None
                ],
            }
        )
    return rows


def _parameters(plan: Plan, graph: Graph) -> list[dict[str, Any]]:
    folded: dict[tuple[Any, ...], dict[str, Any]] = {}
    for parameter in graph.parameters:
        path, meta = parameter.paths[0], graph.tensors[parameter.tensor]
        layout = plan.stages[0].strategy.resting[parameter.tensor]
        gathered = parameter.tensor in plan.stages[0].strategy.regathered
        key = (NUMBERED.sub("*", path), meta.shape, meta.dtype, layout, gathered)
        if key in folded:
            folded[key]["times"] += 1
            continue
        module, _, leaf = path.rpartition(".")
        held = int(largest_shard(meta.shape, layout, plan.stages[0].strategy.sizes)) * (
            meta.bytes // max(meta.elements, 1)
        )
        folded[key] = {
            "row": "parameter",
            "module": module,
            "name": leaf,
            "times": 1,
            "tensor": _tensor(graph, parameter.tensor, layout),
            "bytes": held,
            "regathered": gathered,
        }
    return list(folded.values())


def _tensor(graph: Graph, name: str, needs: Sequence[Any]) -> dict[str, Any]:
    meta = graph.tensors[name]
    return {"name": name, "shape": list(meta.shape), "dtype": meta.dtype, "layout": [_placement(n) for n in needs]}


def _placement(need: Any) -> str:
    """``R``, ``S1``, ``P(sum)``, or ``S2+halo`` for a shard that reads over its border."""
    return f"S{need.dim}+halo" if isinstance(need, Window) else placement_text(need)
