"""Stages across the border of unlike nodes: what a block costs where the rows of a micro-batch are dealt out by speed.

The first axis of such a stage's mesh joins the nodes and cuts rows of the batch only: the recipes that do so are priced on
each kind of device as if all were of that kind, in equal parts. Rows are dealt out in whole units (as many as the axes
inside a node may cut), so that all kinds take about the same time for a block; what a kind computes and holds grows with its
share, what travels for parameters does not. The stage costs what the slowest kind does, and holds what the largest does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from shardwright.cluster import Mesh
from shardwright.search.dealing import deal
from shardwright.search.joint.blocks import NAMED, Again, BlockPrice, BlockPricer
from shardwright.search.joint.parts import Parts


def prices_in_shares(pricer: BlockPricer, mesh: Mesh, microbatches: int, rows: int) -> list[BlockPrice]:
    """The recipes on a mesh of unlike nodes, for micro-batches of so many ``rows``; none where rows are too few to deal out.

    >>> prices_in_shares(pricer, mesh_of(parse_cluster("4xA100+4xH100")), 4, 16)  # doctest: +SKIP
    """
    nodes, found = len(mesh.kinds), []
    for name in NAMED if nodes and mesh.axes[0].size == nodes else ():
        inside = name == "megatron"  # its last axis cuts weights, the others rows
        unit = mesh.devices // nodes // (mesh.axes[-1].size if inside else 1)
        if (inside and len(mesh.axes) == 1) or rows % unit or rows // unit <= nodes:
            continue
        each = pricer.alike(mesh, sorted(set(mesh.kinds), key=mesh.kinds.index), microbatches, name)
        if each is not None:
            own = [each[kind] for kind in mesh.kinds]
            counts = deal(rows // unit, nodes, partial(_block, own, rows / unit / nodes), 1)
            found.append(_together(own, mesh, counts))
    return found


def _block(own: Sequence[BlockPrice], equal: float, node: int, count: int) -> float:
    """Seconds of a block on a node with so many units of rows, of which an ``equal`` part would be so many."""
    price = own[node]
    return price.traffic.block + count / equal * max(price.seconds.block - price.traffic.block, 1e-12)


def _together(own: Sequence[BlockPrice], mesh: Mesh, counts: Sequence[int]) -> BlockPrice:
    """The price of a stage whose nodes have so many units of rows each."""
    shares = tuple(count / sum(counts) for count in counts)
    scaled = [_scaled(price, share * len(counts)) for price, share in zip(own, shares, strict=True)]
    largest = max(scaled, key=lambda price: price.held.block)
    strategy = replace(own[0].strategy, shares={mesh.axes[0].name: shares})

    def most(key: str) -> Parts:
        parts = [getattr(price, key) for price in scaled]
        return Parts(*(max(getattr(one, where) for one in parts) for where in ("head", "block", "tail")))

    def again(key: str) -> Again:
        return Again(max(getattr(price, key).seconds for price in scaled), getattr(largest, key).saves)

    return replace(
        own[0],
        mesh=mesh.with_shares(strategy.shares),
        name=f"{own[0].name} in shares",
        strategy=strategy,
        seconds=most("seconds"),
        traffic=most("traffic"),
        closing=most("closing"),
        resting=most("resting"),
        held=most("held"),
        wholly=again("wholly"),
        lightly=again("lightly"),
    )


def _scaled(price: BlockPrice, part: float) -> BlockPrice:
    """The same with so many times an equal part of the rows."""

    def grown(whole: Parts, fixed: Parts) -> Parts:
        places = ("head", "block", "tail")
        return Parts(*(getattr(fixed, k) + part * (getattr(whole, k) - getattr(fixed, k)) for k in places))

    return replace(
        price,
        seconds=grown(price.seconds, price.traffic),
        held=grown(price.held, Parts(0.0, 0.0, 0.0)),
        wholly=Again(part * price.wholly.seconds, part * price.wholly.saves),
        lightly=Again(part * price.lightly.seconds, part * price.lightly.saves),
    )
