"""Tofu's recursion (Wang, Huang and Li, EuroSys 2019): one mesh axis after the other, each step seeing the earlier ones.

At step k the mesh is its first k axes; every operator keeps what it decided for the first k-1 of them and chooses, with
all others jointly and exactly, what the k-th axis cuts. As in Tofu the problem of each step is coarsened first
(:mod:`shardwright.search.coarsen`). The joint search is the reference: the recursion explores the product of small spaces
instead of the space of products, and is not optimal in general.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.cluster import Mesh
from shardwright.graph import Op, Tensor
from shardwright.operators.rules import Layout, OpRules, Split
from shardwright.operators.strategy import Strategy
from shardwright.search.choose import solve
from shardwright.search.coarsen import coarsen
from shardwright.search.formulate import Described, formulate
from shardwright.search.options import EVERYTHING, Restriction


def recursive(
    described: Described,
    mesh: Mesh,
    within: Restriction = EVERYTHING,
    *,
    optimizer: str = "adamw",
    time_limit: float = 60.0,
    coarse: bool = True,
) -> Strategy:
    """The strategy Tofu's recursion finds on ``mesh``, ignoring memory limits as Tofu does.

    ``coarse=False`` leaves pointwise operators to decide by themselves, which shows what their grouping costs.
    """
    strategy: Strategy | None = None
    for count in range(1, len(mesh.axes) + 1):
        part = replace(mesh, axes=mesh.axes[:count])
        so_far = _first(within, count) & _continuing(strategy, count)
        stated = formulate(described, part, optimizer=optimizer, within=so_far)
        if coarse:
            grouped = coarsen(stated)
            choice = grouped.expand(solve(grouped.problem, time_limit=time_limit).answer)
        else:
            choice = solve(stated.problem, time_limit=time_limit).answer
        strategy = stated.strategy(choice)
    assert strategy is not None  # a mesh has at least one axis
    return strategy


def _first(within: Restriction, count: int) -> Restriction:
    """What is asked of the first axes: inputs that arrive in a given layout have one placement per axis."""
    return replace(within, arrives={name: layout[:count] for name, layout in within.arrives.items()})


def _continuing(earlier: Strategy | None, count: int) -> Restriction:
    """Only what extends the earlier decisions by one axis."""
    if earlier is None:
        return Restriction("recursive")

    def split(op: Op, rules: OpRules, chosen: Split) -> bool:
        return chosen[: count - 1] == earlier.splits[op.name]

    def rest(tensor: Tensor, layout: Layout) -> bool:
        return layout[: count - 1] == earlier.resting[tensor.name]

    return Restriction("recursive", split=split, rest=rest)
