"""What a step of a deep model will about take, from two short ones: no more work for a hundred layers than for ten.

Every further block of a run of equal blocks, split alike, adds the same events and the same bytes. So the steps of two
graphs cut to a few blocks (:mod:`shardwright.graph.shorten`) give the step of the whole on a line through both. The line
misses what grows by jumps (buckets of gradients, the allocator's rounding) and what only a long queue shows; it serves to
tell which candidates deserve a simulation of every event, never as a plan's prediction.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from shardwright.cluster import Mesh
from shardwright.graph import Graph
from shardwright.graph.repeats import Repeat, remembered, span_of
from shardwright.graph.shorten import longest_run, shortened
from shardwright.operators.strategy import Strategy
from shardwright.plans import Prediction
from shardwright.program import Sizes
from shardwright.simulator import simulate

FEW = 4
"""Blocks of the shorter graph, the other has twice as many: enough for what is gathered ahead and for what is under way to
be as in a long run."""

DEEP = 24
"""Runs of fewer blocks are simulated as they are."""

LARGE = 8 * Sizes().bucket
"""Blocks with fewer bytes of parameters fill buckets of gradients in no block's rhythm: of these the short graphs have more,
together as many bytes as a few large ones."""

MANY = 16
"""So many times the blocks of the shorter graph a run of such small blocks must have."""

SLACK = 0.005
"""How far from the simulation of every event a glance may be, relatively (tested)."""


def deep(graph: Graph) -> bool:
    """Whether a graph is one whose strategies can be judged at a glance."""
    run = longest_run(graph)
    if run is None or run.count < DEEP:
        return False
    few = _few(graph, run)
    return few == FEW or run.count >= MANY * few


def glance(graph: Graph, strategy: Strategy, mesh: Mesh, optimizer: str, limit: float) -> Prediction | None:
    """About what simulating ``strategy``, the same for all blocks of a run, would predict; nothing for a shallow graph.

    ``fits`` unless the memory is clearly above ``limit``.
    """
    run = longest_run(graph)
    if run is None or not deep(graph):
        return None
    few = _few(graph, run)
    short = [shortened(graph, count) for count in (few, 2 * few)]
    ends = [_measured(part, strategy, mesh, optimizer) for part in short if part is not None]
    if len(ends) < 2:
        return None
    further = run.count / few - 2
    seconds, summed, peak, sent, exposed = (more + further * (more - less) for less, more in zip(*ends, strict=True))
    return Prediction(seconds, summed, peak, sent, max(exposed, 0.0), peak <= limit * (1 + SLACK))


def _few(graph: Graph, run: Repeat) -> int:
    """Blocks of the shorter graph."""
    return remembered(graph, "_few_blocks", lambda: max(FEW, ceil(FEW * LARGE / max(_parameter_bytes(graph, run), 1))))


def _parameter_bytes(graph: Graph, run: Repeat) -> int:
    """Bytes of the parameters that one block reads."""
    read = {name for op in graph.ops[run.start : run.start + run.period] for name in op.inputs}
    return sum(graph.tensors[name].bytes for name in read if name in graph.parameter_of)


def _measured(graph: Graph, strategy: Strategy, mesh: Mesh, optimizer: str) -> tuple[float, ...]:
    there = tuple(path for path in strategy.recomputed if span_of(graph, path))
    timeline = simulate(graph, replace(strategy, recomputed=there), mesh, training=graph.training, optimizer=optimizer)
    summed, sent = timeline.sum_seconds, timeline.communication_bytes
    return timeline.seconds, summed, timeline.peak_bytes, sent, timeline.exposed_seconds
