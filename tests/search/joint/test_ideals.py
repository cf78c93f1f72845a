"""Stages between ideals: which there are, what crosses their borders, what they cost, and the best of all compositions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwright.cluster import mesh_of, parse_cluster, part_of
from shardwright.errors import ProblemError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.program.stages import stage_graphs
from shardwright.search.choose import solve
from shardwright.search.conditions import Conditions
from shardwright.search.formulate import formulate
from shardwright.search.joint.blocks import BlockPricer
from shardwright.search.joint.found import Model
from shardwright.search.joint.ideals import Ideals, ideals_of, light
from shardwright.search.joint.orders import OTHERS
from shardwright.search.joint.parts import Priced, Sums, by_operators, sums_of
from shardwright.search.joint.pieces import PiecePricer
from shardwright.search.joint.pipelines import BASELINES, search_pipelines
from shardwright.search.joint.readings import readings
from shardwright.search.joint.space import Space
from shardwright.search.joint.timed import Run, Timed
from shardwright.search.options import EVERYTHING
from shardwright.zoo.reference import resolve

ALONE = mesh_of(part_of(parse_cluster("2xH100"), [0]))


class Towers(nn.Module):
    """Two branches that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(256, 512), nn.Linear(256, 128)
        self.deeper, self.last = nn.Linear(512, 384), nn.Linear(512, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left = self.deeper(self.left(x).relu())
        return self.last(torch.cat([left, self.right(y)], 1)).square().mean()


class Skip(nn.Module):
    """What the first layer makes is read by the last one too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(128, 512), nn.Linear(512, 256), nn.Linear(256, 512)
        self.last = nn.Linear(1024, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.first(x[:, :128])
        return self.last(torch.cat([self.third(self.second(first).relu()), first], 1)).square().mean()


class Unlike(nn.Module):
    """A chain of unlike layers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (256, 1024, 128, 640, 32)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {"towers": Towers, "skip": Skip, "unlike": Unlike}


def graph_of(name: str, size: int) -> Graph:
    return capture(MODELS[name](), (torch.zeros(size, 256), torch.zeros(size, 256)), {})


def ideals_with(name: str, most: int) -> Ideals:
    graph = graph_of(name, 8)
    return Ideals.of(graph, {op.name: 1.0 + i % 3 for i, op in enumerate(graph.ops)}, most)


@pytest.mark.parametrize(("name", "most"), itertools.product(MODELS, (4, 6, 48)))
def test_ideals_are_all_sets_that_hold_what_they_depend_on(name: str, most: int) -> None:
    ideals = ideals_with(name, most)
    graph, free = ideals.graph, light(ideals.graph)
    piece = {op.name: int(ideals.pieces[i]) for i, op in enumerate(graph.ops)}
    count = ideals.inside.shape[1]
    assert count <= most and set(piece.values()) == set(range(count))
    heavy = {op.name for op, is_free in zip(graph.ops, free, strict=True) if not is_free}
    needs = {
        (piece[graph.producer[name].name], piece[op.name])
        for op in graph.ops
        for name in op.inputs
        if name in graph.producer and graph.producer[name].name in heavy
    }
    closed = [
        set(chosen)
        for size in range(count + 1)
        for chosen in itertools.combinations(range(count), size)
        if all(a in chosen for a, b in needs if b in chosen)
    ]
    found = [set(np.flatnonzero(row)) for row in ideals.inside]
    assert len(found) == len(closed) and all(one in closed for one in found)
    for a, b in itertools.product(range(ideals.count), repeat=2):
        assert ideals.nested[a, b] == (found[a] < found[b])
        assert a < b or not ideals.nested[a, b]
        assert (b in ideals.next_to(a, 1)) == (a in ideals.next_to(b, -1))
        assert (b in ideals.next_to(a, 1)) == (found[a] < found[b] and len(found[b]) == len(found[a]) + 1)


@pytest.mark.parametrize("name", MODELS)
def test_what_crosses_a_stage_is_what_its_graph_receives_and_sends(name: str) -> None:
    ideals = ideals_with(name, 6)
    received, sent = ideals.crossing
    for start, end in zip(*np.nonzero(ideals.nested), strict=True):
        cuts = sorted({0, int(start), int(end), ideals.count - 1})
        parts = stage_graphs(ideals.graph, [ideals.operators(a, b) for a, b in itertools.pairwise(cuts)])
        part = parts[cuts.index(start)]
        size = ideals.graph.tensors
        assert received[start, end] == sum(size[name].bytes for name in part.received)
        assert sent[start, end] == sum(size[name].bytes for name in part.sent)


def test_more_ideals_than_are_searched_are_those_of_one_order() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(8, 8 + k) for k in range(9))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([branch(x) for branch in self.branches], 1).square().mean()

    graph = capture(Wide(), (torch.zeros(4, 8),), {})
    ideals = Ideals.of(graph, {op.name: 1.0 for op in graph.ops})
    assert ideals.count == ideals.inside.shape[1] + 1
    assert ideals_of(9, np.zeros((0, 2), dtype=np.int64), 80) is None
    with pytest.raises(ProblemError, match="cut apart"):
        Ideals.of(capture(nn.Linear(4, 4), (torch.zeros(2, 4),), {}), {})


def paid_by(alone: Priced, strategy: Strategy) -> np.ndarray:
    """Seconds of every operator where each decides for itself: a change of layout is its only operator's, of two the later
    one's; a parameter's update comes once a step and so is none of them."""
    stated, choice = alone.stated, alone.stated.choice(strategy)
    place = {op.name: index for index, op in enumerate(stated.graph.ops)}
    paid = np.zeros(len(place))
    for node, costs, pick in zip(stated.nodes, alone.each.costs, choice, strict=True):
        assert node.times == 1
        if node.kind == "op":
            paid[place[node.name]] += costs[pick]
        else:
            assert costs[pick] == pytest.approx(0.0, abs=1e-12)
    for edge in alone.each.edges:
        ends = [stated.nodes[k] for k in (edge.first, edge.second)]
        who = max(place[node.name] for node in ends if node.kind == "op")
        paid[who] += edge.costs[choice[edge.first], choice[edge.second]]
    return paid


@pytest.mark.parametrize("reference", ["gpt:small,layers=3", "llama:small,layers=3"])
def test_costs_per_operator_are_those_of_a_problem_in_which_every_operator_decides_for_itself(reference: str) -> None:
    """Alike blocks share a decision, so its costs are dealt out; the same strategy without sharing tells them one by one."""
    resolved = resolve(reference, batch=4)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    mesh = mesh_of(parse_cluster("2xH100"))
    shared, alone = (
        Priced.of(formulate(graph, mesh, memory_limit=1e15, within=replace(EVERYTHING, fold=fold)))
        for fold in (True, False)
    )
    strategy = shared.stated.strategy(np.asarray(solve(shared.stated.problem).answer))
    # Of one micro-batch no gradients are added up: its seconds are those of the problem.
    mine, theirs = (sums_of(one, strategy, by_operators(one.stated), 1) for one in (shared, alone))
    np.testing.assert_allclose(mine.seconds, paid_by(alone, strategy), rtol=1e-6, atol=1e-6 * mine.seconds.max())
    for key in Sums._fields:
        one, other = getattr(mine, key), getattr(theirs, key)
        assert one.sum() == pytest.approx(other.sum(), rel=1e-9)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * max(np.abs(other).max(), 1e-12), err_msg=key)


def test_stages_add_up_to_the_model() -> None:
    pricer = PiecePricer(graph_of("towers", 8), ALONE)
    for price in pricer.prices(mesh_of(parse_cluster("2xH100")), 4):
        for key in Sums._fields:
            measured = getattr(price, key)
            cuts = [0]
            while cuts[-1] != pricer.ideals.count - 1:
                cuts.append(pricer.ideals.next_to(cuts[-1], 1)[-1])
            stages = [float(measured.of(np.array(a), np.array(b))) for a, b in itertools.pairwise(cuts)]
            assert min(stages) >= -1e-12
            assert sum(stages) == pytest.approx(float(measured.of(np.array(0), np.array(-1))))
        assert float(price.seconds.of(np.array(0), np.array(-1))) > 0


def few_pieces(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    made = Ideals.of
    monkeypatch.setattr(Ideals, "of", staticmethod(lambda graph, work: made(graph, work, most)))


def chains(nested: np.ndarray, stages: int) -> Iterator[list[int]]:
    last = len(nested) - 1
    for inner in itertools.combinations(range(1, last), stages - 1):
        cuts = [0, *inner, last]
        if all(nested[a, b] for a, b in itertools.pairwise(cuts)):
            yield cuts


def every_step(space: Space, order: str) -> Iterator[float]:
    """Every way to lead from ideal to ideal on aligned powers of two of devices and to run each of these stages."""
    timed = Timed(space, space.rows, order)
    for stages in range(1, space.most + 1):
        for cuts, units in itertools.product(
            chains(space.cutting.nested, stages), itertools.product([1, 2, 4], repeat=stages)
        ):
            ways = timed.stages([Run(*ends, own) for ends, own in zip(itertools.pairwise(cuts), units, strict=True)])
            yield from map(timed.step, itertools.product(*ways) if ways else ())


@pytest.mark.parametrize(
    ("name", "where", "limit"),
    [
        ("towers", "4xH100", None),
        ("towers", "2x2xH100", None),
        ("towers", "2xA100-80GB+2xH100", None),
        ("skip", "4xH100", None),
        ("skip", "2x2xH100", 3e6),
        ("unlike", "4xH100", 4e6),
        ("unlike", "2x2xH100", None),
        ("unlike", "2xH100+2xV100", None),
    ],
)
def test_the_bound_is_below_every_pipeline_and_the_answer_is_the_best(
    name: str, where: str, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_pieces(monkeypatch, 5)
    graph, cluster = graph_of(name, 64), parse_cluster(where)
    space = Space(
        Model(lambda size: graph), cluster, 256, 64, Conditions(memory_limit=limit), 2, 64, PiecePricer(graph, ALONE)
    )
    orders = ("1f1b", *(order for order in OTHERS if order in ("zb-h1", "zb-h2")))
    steps = {order: min(every_step(space, order), default=np.inf) for order in orders}
    fastest, free = min(steps.values()), space.bound()
    assert free <= fastest * (1 + 1e-9)
    for known in (fastest, 1.2 * fastest):  # what is known leaves more out, and nothing that is faster
        assert free * (1 - 1e-9) <= space.bound(known) <= fastest * (1 + 1e-9)
    assert all(steps[order] <= space.even(order) for order in steps if order != "gpipe")
    best = space.improved(space.composed(known=space.even()))
    assert best is not None
    for order, found in (("1f1b", best), *((order, space.ordered(order, [best])) for order in OTHERS)):
        assert (found is None) == np.isinf(steps.get(order, np.inf))
        if found is None:
            continue
        assert found.step_seconds == pytest.approx(steps[order], rel=1e-9)
        assert all(stage.memory_bytes <= (limit or np.inf) for stage in found.stages)
        ends = [(stage.first_block, stage.last_block) for stage in found.stages]
        assert all(space.cutting.nested[a, b] for a, b in ends)
        operators = [name for stage in found.stages for name in stage.operators]
        assert sorted(operators) == sorted(op.name for op in graph.ops)


def test_no_worse_than_any_baseline() -> None:
    graph = graph_of("skip", 16)
    best, others = search_pipelines(
        Model(lambda size: graph), parse_cluster("2x2xH100"), batch=64, microbatch_sizes=(16,), baselines=BASELINES
    )
    assert best.bound_seconds <= best.step_seconds
    assert all(best.step_seconds <= plan.step_seconds for plan in others.values() if not isinstance(plan, str))


def test_blocks_that_are_most_of_a_model_are_its_only_reading() -> None:
    cluster = parse_cluster("2xH100")

    def kinds(reference: str) -> list[type]:
        resolved = resolve(reference, batch=2)
        return [
            type(one) for one in readings(capture(resolved.model, resolved.args, resolved.kwargs), cluster, "adamw")
        ]

    assert kinds("gpt:layers=4,width=256,heads=4,vocab=512,seq=128") == [BlockPricer]
    assert kinds("hf:t5:small,num_layers=3,num_decoder_layers=3") == [BlockPricer, PiecePricer]
    assert [type(one) for one in readings(graph_of("towers", 4), cluster, "adamw")] == [PiecePricer]
