"""Changing a tensor's layout: the cheapest sequence of collectives between two layouts, and its backward dual.

Layouts form a graph (:mod:`~shardwright.costs.layouts`) whose edges are single collectives with a price; a change of
layout is a shortest path in it, found for all pairs at once (Floyd 1962, Warshall 1962) and shared by all tensors of
equal shape, dtype and mesh. The gradient of a tensor laid out A, used as B, travels from dual(B) to dual(A), again along
a shortest path.

A :class:`~shardwright.operators.rules.Window` need is reached from a shard by an exchange with the neighbours (``halo``,
backwards ``halo_reduce``: overlaps are sent back and added) or from a replica by taking the region (``slice`` with a
window, backwards ``zero_pad`` with it); the cheaper way is chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.cluster import Mesh
from shardwright.costs import collectives
from shardwright.costs.layouts import KINDS, LayoutGraph, dual, layout_graph, local_elements
from shardwright.graph.core import DTYPE_BYTES
from shardwright.operators.rules import Layout, Need, Partial, Replicate, Shard, Window
from shardwright.program.steps import COMMUNICATION, Route, Step

Weights = tuple[float, ...]
"""What a second counts on the compute stream, and on that of every mesh axis; nothing where all count as they are."""

COLLECTIVE_LAUNCHES = 4
"""Issuing a collective costs the host as much as several operators (measured: about 20 µs against 5)."""


def step_seconds(step: Step, mesh: Mesh) -> float:
    """Seconds of one step of a change of layout."""
    device = mesh.device
    if not step.communicates:
        amount = 2 * step.bytes_out if step.kind == "slice" else step.bytes_in + step.bytes_out
        return device.launch_overhead + amount / device.bandwidth
    return collective_seconds([step], mesh)


def collective_seconds(steps: Sequence[Step], mesh: Mesh) -> float:
    """Seconds of one collective that carries the bytes of several steps of one kind along one axis.

    Collectives concatenate along the first dim; any other dim costs each of them a transposing copy.
    """
    first, axis, device = steps[0], mesh.axes[steps[0].axis], mesh.device
    launch = COLLECTIVE_LAUNCHES * device.launch_overhead
    if first.window is not None:
        overlap = abs(first.bytes_out - first.bytes_in)
        return launch + float(collectives.halo(overlap, axis)) + 2 * first.wire_bytes / device.bandwidth
    amount = max(sum(step.bytes_in for step in steps), sum(step.bytes_out for step in steps))
    ordered = sum(2 * step.wire_bytes / device.bandwidth for step in steps if step.dim or step.to_dim)
    return launch + float(collectives.SECONDS[first.kind](amount, axis)) + ordered


@dataclass(frozen=True)
class Conversion:
    """A change of layout: its steps, those of its backward pass, and what both cost. ``seconds`` is the forward part."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    seconds: float
    backward_seconds: float

    @property
    def bytes(self) -> int:
        """Bytes communicated by one rank, forward and backward."""
        return sum(step.wire_bytes for step in (*self.forward, *self.backward))

    @property
    def route(self) -> Route:
        return Route(self.forward, self.backward)

    @property
    def possible(self) -> bool:
        return self.seconds < np.inf and self.backward_seconds < np.inf


@dataclass(frozen=True, eq=False)
class _Prices:
    """For one (shape, dtype, mesh): bytes per state, seconds per edge, seconds between all pairs of states."""

    graph: LayoutGraph
    bytes: np.ndarray
    edges: np.ndarray
    pairs: np.ndarray


def _edge_seconds(graph: LayoutGraph, local: np.ndarray, mesh: Mesh, weights: Weights) -> np.ndarray:
    bytes_in, bytes_out = local[graph.source], local[graph.target]
    device = mesh.device
    seconds = np.full(len(graph.source), np.inf)
    possible = np.isfinite(bytes_in) & np.isfinite(bytes_out)
    copy = device.launch_overhead + (bytes_in + bytes_out) / device.bandwidth
    for index, kind in enumerate(KINDS):
        for number, axis in enumerate(mesh.axes):
            chosen = possible & (graph.kind == index) & (graph.axis == number)
            if kind in COMMUNICATION:
                amount = np.maximum(bytes_in[chosen], bytes_out[chosen])
                price = COLLECTIVE_LAUNCHES * device.launch_overhead + collectives.SECONDS[kind](amount, axis)
                # Collectives concatenate along the first dim; any other dim costs a transposing copy.
                inner = (graph.dim[chosen] > 0) | (graph.to_dim[chosen] > 0)
                seconds[chosen] = price + np.where(inner, 2 * amount / device.bandwidth, 0.0)
            elif kind == "slice":
                seconds[chosen] = device.launch_overhead + 2 * bytes_out[chosen] / device.bandwidth
            else:
                seconds[chosen] = copy[chosen]
    if not weights:
        return seconds
    sent = np.isin(graph.kind, [index for index, kind in enumerate(KINDS) if kind in COMMUNICATION])
    counts = np.where(sent, np.array(weights[1:])[graph.axis], weights[0])
    return np.multiply(seconds, counts, out=np.full(len(seconds), np.inf), where=np.isfinite(seconds))


def _all_pairs(count: int, graph: LayoutGraph, edges: np.ndarray) -> np.ndarray:
    pairs = np.full((count, count), np.inf)
    pairs[graph.source, graph.target] = edges  # at most one edge joins two states
    np.fill_diagonal(pairs, 0.0)
    through = np.empty_like(pairs)
    for middle in range(count):
        if np.isinf(pairs[middle]).sum() == count - 1:
            continue  # a state nobody can be in
        np.add(pairs[:, middle, None], pairs[None, middle, :], out=through)
        np.minimum(pairs, through, out=pairs)
    return pairs


@lru_cache(maxsize=1024)
def _prices(shape: tuple[int, ...], dtype: str, mesh: Mesh, linear: tuple[bool, ...], weights: Weights = ()) -> _Prices:
    graph = layout_graph(len(shape), len(mesh.axes), linear)
    local = local_elements(shape, graph, mesh.cuts) * DTYPE_BYTES[dtype]
    edges = _edge_seconds(graph, local, mesh, weights)
    return _Prices(graph, local, edges, _all_pairs(len(local), graph, edges))


def _linear(layouts: Sequence[Layout], axes: int) -> tuple[bool, ...]:
    return tuple(
        not any(type(p := x[axis]) is Partial and p.reduce_op != "sum" for x in layouts) for axis in range(axes)
    )


@dataclass(frozen=True)
class _Base:
    """A plain layout from which a need is reached, and the window steps that lead from it to the need."""

    layout: Layout
    windows: tuple[tuple[int, Window], ...]


def _bases(target: Sequence[Need]) -> list[_Base]:
    windows = [(axis, need) for axis, need in enumerate(target) if isinstance(need, Window)]
    found = []
    for sharded in itertools.product((True, False), repeat=len(windows)):
        layout = list(target)
        for (axis, need), cut in zip(windows, sharded, strict=True):
            layout[axis] = Shard(need.dim) if cut else Replicate()
        found.append(_Base(tuple(layout), tuple(windows)))  # type: ignore[arg-type]  # windows were replaced
    return found


def _window_step(
    axis: int, window: Window, held: Sequence[int], base: Layout, itemsize: int, mesh: Mesh, backward: bool
) -> tuple[Step, bool]:
    """The step from (to, in the backward pass) a plain layout to (from) a window, and whether it can be done.

    ``held`` is the local shape there. A halo cannot reach past the neighbour.
    """
    other = float(np.prod([n for dim, n in enumerate(held) if dim != window.dim])) * itemsize
    overlap = max(window.high - window.low + 1 - window.scale, 0)
    if isinstance(base[axis], Shard):
        rows, reach = held[window.dim], max(-window.low, window.high - window.scale + 1)
        whole, part = (rows + overlap) * other, rows * other
        ins, outs = (whole, part) if backward else (part, whole)
        kind = "halo_reduce" if backward else "halo"
        step = Step(kind, axis, window.dim, None, int(ins), int(outs), "sum" if backward else None, window)
        return step, reach <= rows
    region, whole = (mesh.axes[axis].longest(held[window.dim]) + overlap) * other, held[window.dim] * other
    ins, outs = (region, whole) if backward else (whole, region)
    kind = "zero_pad" if backward else "slice"
    return Step(kind, axis, window.dim, None, int(ins), int(outs), None, window), True


def _largest_shape(shape: Sequence[int], layout: Layout, mesh: Mesh) -> list[int]:
    held = list(shape)
    for placement, axis in zip(layout, mesh.axes, strict=True):
        if isinstance(placement, Shard):
            held[placement.dim] = axis.longest(held[placement.dim])
    return held


def _window_steps(
    shape: Sequence[int], dtype: str, base: _Base, mesh: Mesh, backward: bool, weights: Weights = ()
) -> tuple[list[Step], float]:
    """The steps between a plain layout and the windows, and their seconds."""
    held = _largest_shape(shape, base.layout, mesh)
    steps, seconds = [], 0.0
    for axis, window in base.windows:
        step, possible = _window_step(axis, window, held, base.layout, DTYPE_BYTES[dtype], mesh, backward)
        steps.append(step)
        counts = weights[1 + axis if step.communicates else 0] if weights else 1.0
        seconds += counts * step_seconds(step, mesh) if possible else np.inf
        overlap = max(window.high - window.low + 1 - window.scale, 0)
        if isinstance(base.layout[axis], Replicate):
            held[window.dim] = mesh.axes[axis].longest(held[window.dim])
        held[window.dim] += overlap  # a second window exchanges the first one's halo too: corners travel
    return (steps[::-1] if backward else steps), seconds


def _path(prices: _Prices, start: int, goal: int, source: Layout, target: Layout) -> list[Step]:
    """The steps of a shortest path, read off the distances."""
    graph, steps, here = prices.graph, [], start
    while here != goal:
        edges = graph.leaving[here]
        best = edges[np.argmin(prices.edges[edges] + prices.pairs[graph.target[edges], goal])]
        kind, axis, after = KINDS[graph.kind[best]], int(graph.axis[best]), int(graph.target[best])
        reduce = None
        if kind in ("all_reduce", "reduce_scatter"):
            held = next((x[axis] for x in (source, target) if isinstance(x[axis], Partial)), Partial("sum"))
            reduce = str(held.reduce_op)  # type: ignore[union-attr]  # chosen to be a Partial
        dim, to_dim = int(graph.dim[best]), int(graph.to_dim[best])
        steps.append(
            Step(
                kind,
                axis,
                dim if dim >= 0 else None,
                to_dim if to_dim >= 0 else None,
                int(prices.bytes[here]),
                int(prices.bytes[after]),
                reduce,
            )
        )
        here = after
    return steps


@lru_cache(maxsize=65536)
def conversion(
    shape: tuple[int, ...], dtype: str, source: Layout, target: tuple[Need, ...], mesh: Mesh, grad: bool = True
) -> Conversion:
    """The cheapest way to bring a tensor from one layout to what a reader needs, with the way its gradient goes back.

    Impossible changes (a dim too short to be cut, an unreduced maximum made from shards) have infinite seconds and no
    steps.

    >>> from shardwright.cluster import mesh_of, parse_cluster
    >>> mesh = mesh_of(parse_cluster("8xH200"))
    >>> change = conversion((1024, 1024), "bfloat16", (Shard(0),), (Replicate(),), mesh)
    >>> [s.kind for s in change.forward], [s.kind for s in change.backward]
    (['all_gather'], ['reduce_scatter'])
    """
    bases = _bases(target)
    totals = [float(sum(part[0] for part in _seconds(shape, dtype, [source], base, mesh, grad))) for base in bases]
    base = bases[int(np.argmin(totals))]
    if not min(totals) < np.inf:
        return Conversion((), (), np.inf, np.inf if grad else 0.0)
    prices = _prices(shape, dtype, mesh, _linear([source, base.layout], len(mesh.axes)))
    state = prices.graph.state
    forward_steps = _path(prices, state(source), state(base.layout), source, base.layout)
    forward_steps += _window_steps(shape, dtype, base, mesh, backward=False)[0]
    backward_steps: list[Step] = []
    if grad:
        back = _prices(shape, dtype, mesh, (True,) * len(mesh.axes))
        start, goal = dual(base.layout), dual(source)
        backward_steps = _window_steps(shape, dtype, base, mesh, backward=True)[0]
        backward_steps += _path(back, back.graph.state(start), back.graph.state(goal), start, goal)
    return Conversion(
        tuple(forward_steps),
        tuple(backward_steps),
        sum(step_seconds(step, mesh) for step in forward_steps),
        sum(step_seconds(step, mesh) for step in backward_steps),
    )


def _seconds(
    shape: tuple[int, ...],
    dtype: str,
    sources: Sequence[Layout],
    base: _Base,
    mesh: Mesh,
    grad: bool,
    weights: Weights = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward seconds from each source to one base and on to its windows."""
    axes = len(mesh.axes)
    forward, backward = np.empty(len(sources)), np.zeros(len(sources))
    extra = _window_steps(shape, dtype, base, mesh, False, weights)[1]
    extra_back = _window_steps(shape, dtype, base, mesh, True, weights)[1]
    every = (True,) * axes
    for linear in {_linear([source, base.layout], axes) for source in sources}:
        rows = [i for i, source in enumerate(sources) if _linear([source, base.layout], axes) == linear]
        prices = _prices(shape, dtype, mesh, linear, weights)
        goal = prices.graph.state(base.layout)
        forward[rows] = prices.pairs[[prices.graph.state(sources[i]) for i in rows], goal] + extra
        for i in rows:
            if any(_mismatch(a, b) for a, b in zip(sources[i], base.layout, strict=True)):
                forward[i] = np.inf
    if grad:
        back = _prices(shape, dtype, mesh, every, weights)
        start = back.graph.state(dual(base.layout))
        backward[:] = back.pairs[start, [back.graph.state(dual(source)) for source in sources]] + extra_back
    return forward, backward


def _mismatch(source: object, target: object) -> bool:
    """Unreduced values of one kind cannot become unreduced values of another without being reduced."""
    return isinstance(source, Partial) and isinstance(target, Partial) and source.reduce_op != target.reduce_op


def conversion_matrix(
    shape: tuple[int, ...],
    dtype: str,
    sources: Sequence[Layout],
    targets: Sequence[tuple[Need, ...]],
    mesh: Mesh,
    grad: bool = True,
    weights: Weights = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward seconds of every change from a source to a target, as two [sources, targets] arrays.

    With ``weights`` every step counts as its stream does, and the way is the one that counts least.
    """
    axes = len(mesh.axes)
    every = (True,) * axes
    forward = np.empty((len(sources), len(targets)))
    backward = np.zeros_like(forward)
    plain = [
        j
        for j, target in enumerate(targets)
        if not any(isinstance(n, Window) or (isinstance(n, Partial) and n.reduce_op != "sum") for n in target)
    ]
    if plain and _linear(sources, axes) == every:
        prices = _prices(shape, dtype, mesh, every, weights)
        state = prices.graph.state
        goals: list[Layout] = [targets[j] for j in plain]  # type: ignore[misc]  # no windows among them
        rows, columns = [state(s) for s in sources], [state(t) for t in goals]
        forward[:, plain] = prices.pairs[np.ix_(rows, columns)]
        if grad:
            starts, ends = [state(dual(t)) for t in goals], [state(dual(s)) for s in sources]
            backward[:, plain] = prices.pairs[np.ix_(starts, ends)].T
    else:
        plain = []
    done = set(plain)
    for j, target in enumerate(targets):
        if j in done:
            continue
        ways = [_seconds(shape, dtype, sources, base, mesh, grad, weights) for base in _bases(target)]
        choice = np.argmin(np.stack([a + b for a, b in ways]), axis=0)
        forward[:, j] = np.stack([a for a, _ in ways])[choice, np.arange(len(sources))]
        backward[:, j] = np.stack([b for _, b in ways])[choice, np.arange(len(sources))]
    return forward, backward
