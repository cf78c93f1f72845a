"""One mesh over unlike nodes, the rows of the batch dealt out by their speed.

A plan over unlike devices counts on what all of them can do, each with an equal part. Where the first axis of its mesh
joins the nodes, whatever that axis cuts may as well be cut in unequal shares (:mod:`shardwright.program.resting`): whole
rows of the batch, so many that all kinds of devices are done at the same time. Each kind is simulated on its own, with its
own pieces on its own device; the slowest says what the step takes, and each must have room. What the strategy is comes from
two searches: that of the plan in equal parts, and the same with all devices taken for the fastest kind. The second one's
bound holds for shares too: the fastest are never given less than an equal part, so they do no less than they would there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from shardwright.cluster import Cluster, Device, Mesh, mesh_of
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.errors import Infeasible, LoweringError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.planner.delivering import deliver
from shardwright.planner.options import Options, Progress
from shardwright.planner.planning import plan_graph
from shardwright.planner.proposals import LaidOut, on_one_mesh
from shardwright.planner.recomputing import recomputed_note
from shardwright.planner.trials import predict
from shardwright.plans import Plan, Stage
from shardwright.plans.proof import STEP
from shardwright.plans.stages import one_pass
from shardwright.program.microbatches import batch_of
from shardwright.program.pipeline import Pipeline
from shardwright.program.validate import validate
from shardwright.search.dealing import deal
from shardwright.simulator import simulate

ROUNDS = 3
"""Shares are dealt out by what the shares before took, so many times."""


def with_shares(
    flat: Plan, graph: Graph, cluster: Cluster, options: Options, progress: Progress | None = None, reference: str = ""
) -> Plan:
    """A plan on one mesh of unlike nodes, or the fastest one found in which rows are dealt out by speed; either way with a
    bound for both.

    Example
    -------
    >>> with_shares(plan, graph, cluster, Options()).stages[0].strategy.shares                   # doctest: +SKIP
    """
    mesh = mesh_of(cluster)
    if not mesh.kinds:
        return flat
    say = progress or (lambda text: None)
    say("dealing out rows between unlike devices")
    fastest = max(mesh.kinds, key=_speed)
    alike = replace(cluster, nodes=tuple(replace(node, device=fastest) for node in cluster.nodes))
    whole = replace(options, baselines=(), fewer_devices=False, one_axis=False)  # nodes have unlike shares
    fast = plan_graph(graph, alike, whole, progress=progress, reference=reference)
    dealt_out = fast.proof.sharing(fastest.name)
    strategies = [flat.stages[0].strategy, fast.stages[0].strategy]
    if strategies[0].axes[0][0] != "node":  # one axis over all devices, which cannot be dealt out
        with suppress(Infeasible):
            alone = plan_graph(graph, cluster, whole, progress=progress, reference=reference)
            strategies.append(alone.stages[0].strategy)
    best, beat = None, flat.prediction.step_seconds
    for strategy in strategies:
        for shared in _dealt(graph, strategy, cluster, options):
            where, shares = mesh_of(cluster, shared.sizes), shared.shares[shared.axes[0][0]]
            if any(kind == fastest and share * len(shares) < 1 for kind, share in zip(mesh.kinds, shares, strict=True)):
                continue  # the bound is not one for these
            prediction = predict(graph, shared, where, options.optimizer, options.memory_limit)
            if prediction.fits and prediction.step_seconds < beat:
                best, beat = (shared, prediction), prediction.step_seconds
    if best is None:
        return replace(flat, proof=flat.proof.beside(dealt_out.about(STEP)))
    shared, prediction = best
    rows = [round(share * batch_of(graph)) for share in shared.shares[shared.axes[0][0]]]
    dealt = ", ".join(f"{count} rows on {node.device.name}" for count, node in zip(rows, cluster.nodes, strict=True))
    proposal = LaidOut(
        name=flat.candidates[0].name,
        shape=shared.axes,
        expected=prediction,
        proof=replace(flat.proof.beside(dealt_out), cost=min(flat.proof.cost, prediction.sum_seconds)),
        notes=tuple(filter(None, (dealt, recomputed_note(shared)))),
        prediction=prediction,
        layout=on_one_mesh(graph, shared),
    )
    found = deliver(graph, cluster, options, proposal, reference)
    equal = replace(flat.candidates[0], name="equal parts")
    return replace(found, candidates=(*found.candidates, equal, *flat.candidates[1:]), replicated=flat.replicated)


def _speed(device: Device) -> tuple[float, ...]:
    return device.peak("bfloat16"), device.peak("float32"), device.bandwidth


def _dealt(graph: Graph, strategy: Strategy, cluster: Cluster, options: Options) -> Iterator[Strategy]:
    """A strategy in shares between the nodes, as often dealt out as that changes anything; nothing where it cannot be."""
    nodes = len(cluster.nodes)
    if strategy.axes[0] != ("node", nodes):
        return
    mesh, rows = mesh_of(cluster, strategy.sizes), batch_of(graph)
    inside = strategy.devices // nodes
    unit = inside if rows % inside == 0 and rows // inside > nodes else 1  # as the axes inside a node may cut them too
    units, seen = rows // unit, set[tuple[int, ...]]()
    if units <= nodes:
        return

    def taken(counts: Sequence[int]) -> list[float]:
        shared = _shared(strategy, counts)
        return [_seconds(graph, shared, mesh, place, options.optimizer) for place in range(nodes)]

    counts = [units // nodes + (place < units % nodes) for place in range(nodes)]
    try:
        before, after = (counts, taken(counts)), (counts, taken(counts))
        for _ in range(ROUNDS):
            counts = list(deal(units, nodes, _line(before, after), least=1))
            if tuple(counts) in seen:
                return
            seen.add(tuple(counts))
            shared = _shared(strategy, counts)
            alone = Pipeline.of(graph, [Stage.of(graph, shared)], 1, one_pass(graph.training))
            validate(alone, [PricedDecisions(mesh.with_shares(shared.shares))])
            yield shared
            before, after = after, (counts, taken(counts))
    except (LoweringError, Infeasible):
        return  # something that the axis cuts does not come in such parts


def _shared(strategy: Strategy, counts: Sequence[int]) -> Strategy:
    return replace(strategy, shares={strategy.axes[0][0]: tuple(count / sum(counts) for count in counts)})


def _seconds(graph: Graph, strategy: Strategy, mesh: Mesh, place: int, optimizer: str) -> float:
    """The step as a device at a place of the first axis has it."""
    where = (place, *(0 for _ in strategy.axes[1:]))
    return simulate(graph, strategy, mesh, graph.training, optimizer, coordinate=where).seconds


def _line(
    one: tuple[Sequence[int], list[float]], other: tuple[Sequence[int], list[float]]
) -> Callable[[int, int], float]:
    """Seconds of a node with so many units: on the line through two dealings, or in proportion to the last."""

    def seconds(node: int, count: int) -> float:
        (a, s), (b, t) = ((counts[node], taken[node]) for counts, taken in (one, other))
        slope = max((t - s) / (b - a), 0.1 * t / b) if a != b else t / b
        return max(t + slope * (count - b), 1e-3 * slope * count)

    return seconds
