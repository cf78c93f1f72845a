"""Strategies to try a program with: chosen at random from everything the operators' rules allow, or by a fixed recipe."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardwright.cluster import Axis, Mesh, mesh_of, parse_cluster
from shardwright.costs.redistribute import conversion
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.operators.rules import Layout, Split, input_layouts, output_layouts
from shardwright.operators.strategy import Strategy
from shardwright.search.options import EVERYTHING, layouts_of, splits_of

T = TypeVar("T")
Choose = Callable[[str, Sequence[T]], T]


def mesh_with(sizes: tuple[int, ...]) -> Mesh:
    """A priced mesh of these sizes, whose axes are called ``a``, ``b``, …"""
    import math

    found = mesh_of(parse_cluster(f"local:{math.prod(sizes)}"))
    link = found.axes[0]
    axes = tuple(Axis("abc"[i], size, link.latency, link.bandwidth) for i, size in enumerate(sizes))
    return Mesh(axes, found.device)


def chosen_strategy(
    graph: Graph, mesh: Mesh, choose_split: Choose, choose_layout: Choose, kept: bool = True
) -> Strategy:
    """Walk the graph and choose a split for every operator, among those whose inputs can be brought into shape."""
    sizes = mesh.sizes
    resting: dict[str, Layout] = {
        name: choose_layout(name, layouts_of(graph.tensors[name], sizes)) for name in graph.sources
    }
    at: dict[str, Layout] = dict(resting)
    splits: dict[str, Split] = {}
    keeps: dict[str, Layout] = {}
    for op in graph.ops:
        rules = analyse(op, graph.tensors)

        def reachable(split: Split, op=op, rules=rules) -> bool:
            needs = input_layouts(rules, split, len(op.inputs))
            return all(
                at[name] == need
                or conversion(
                    graph.tensors[name].shape, graph.tensors[name].dtype, at[name], need, mesh, graph.tensors[name].grad
                ).possible
                for name, need in zip(op.inputs, needs, strict=True)
            )

        options = [split for split in splits_of(op, rules, sizes, {}, EVERYTHING) if reachable(split)]
        splits[op.name] = choose_split(op.name, options)
        for name, layout in zip(op.outputs, output_layouts(rules, splits[op.name], len(op.outputs)), strict=True):
            if name is None:
                continue
            at[name] = layout
            if kept and len(graph.consumers[name]) > 1:
                meta = graph.tensors[name]
                homes = [
                    other
                    for other in layouts_of(meta, sizes)
                    if conversion(meta.shape, meta.dtype, layout, other, mesh, meta.grad).possible
                ]
                keeps[name] = at[name] = choose_layout(name, [layout, *homes])
    return Strategy(mesh.names, splits, resting, keeps)


def random_strategy(graph: Graph, mesh: Mesh, seed: int) -> Strategy:
    """Uniformly random splits and layouts; half of the gathered parameters are gathered again in backward."""
    dice = random.Random(seed)

    def choose(_: str, options: Sequence[T]) -> T:
        return dice.choice(options)

    strategy = chosen_strategy(graph, mesh, choose, choose)
    again = frozenset(p.tensor for p in graph.parameters if dice.random() < 0.5)
    return Strategy(strategy.axes, strategy.splits, strategy.resting, strategy.kept, again)
