"""Recomputed blocks in the program and in memory: what runs twice, when, and what is no longer kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.distributed.tensor import Replicate

from program.steps import memory_of, priced
from shardwright import zoo
from shardwright.cluster import mesh_of, parse_cluster
from shardwright.costs.memory import ACTIVATIONS, memory
from shardwright.costs.pricing import FREE, Priced
from shardwright.errors import LoweringError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths, span_of
from shardwright.operators.strategy import Strategy
from shardwright.program import Kind, Sizes
from shardwright.program.validate import validate_program
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate

MESH = mesh_of(parse_cluster("local:1"))


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model, args, kwargs = zoo.build("gpt", layers=4, width=64, heads=4, seq=32, vocab=128, batch=16)
        return capture(model, args, kwargs)


@pytest.fixture(scope="module")
def whole(graph: Graph) -> Strategy:
    return _whole(graph)


@pytest.fixture(scope="module")
def again(graph: Graph, whole: Strategy) -> Priced:
    return priced(graph, replace(whole, recomputed=block_paths(graph)), MESH)


def test_every_operator_before_the_last_save_runs_once_more(graph: Graph, again: Priced) -> None:
    """The block's last product keeps its inputs only, so neither it nor the sum after it runs again."""
    for path in block_paths(graph):
        names = [graph.ops[i].name for i in span_of(graph, path)]
        assert [
            e.name for e in again.events if e.phase == "recompute" and e.kind not in FREE and e.name in names
        ] == names[:-2]


def test_everything_else_is_as_before(graph: Graph, whole: Strategy, again: Priced) -> None:
    plain = priced(graph, whole, MESH)
    kept = [(e.phase, e.name, e.seconds) for e in again.events if e.phase != "recompute"]
    assert kept == [(e.phase, e.name, e.seconds) for e in plain.events]
    forward = {e.name: e.seconds for e in plain.events if e.phase == "forward"}
    repeated = [e for e in again.events if e.phase == "recompute"]
    assert again.seconds == pytest.approx(plain.seconds + sum(forward[e.name] for e in repeated))


def test_a_block_runs_again_between_its_successors_backward_and_its_own(graph: Graph, again: Priced) -> None:
    order = [
        (e.phase, e.module.split(".")[1])
        for e in again.events
        if e.module.startswith("blocks.")
        and e.phase in ("recompute", "backward")
        and e.kind in ("operator", "input", "weight")
    ]
    turns = [turn for n, turn in enumerate(order) if n == 0 or order[n - 1] != turn]
    middle = [("recompute", "2"), ("backward", "2"), ("backward", "1"), ("recompute", "1"), ("backward", "1")]
    where = turns.index(middle[0])
    assert turns[where : where + len(middle)] == middle
    assert Counter(turns)["recompute", "1"] == 1


def test_between_forward_and_backward_only_inputs_of_blocks_are_kept(
    graph: Graph, whole: Strategy, again: Priced
) -> None:
    first = next(n for n, e in enumerate(again.events) if e.phase == "backward")
    use = memory(again.program, MESH.device)
    lasting = [s for s in use.storages if s.kind == ACTIVATIONS and s.born <= first <= s.dies and s.bytes]
    kept = [s for s in lasting if s.module[:6] == "blocks"]
    one = 16 * 32 * 64 * 4
    assert [s.bytes for s in kept] == [one] * len(block_paths(graph))  # each hands its output to the next, or the head
    assert use.peak < memory_of(graph, whole, MESH).peak / 2


def test_fewer_blocks_save_less(graph: Graph, whole: Strategy) -> None:
    paths = block_paths(graph)
    peaks = [memory_of(graph, replace(whole, recomputed=paths[:n]), MESH).peak for n in (0, 2, 4)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


def test_what_a_block_reads_again_is_gathered_ahead(graph: Graph) -> None:
    """Cut at rest, all blocks recomputed: each one's gathers begin while the block after it goes backward."""
    mesh, paths = mesh_of(parse_cluster("2xH100")), block_paths(graph)
    stated = formulate(graph, mesh, within=restriction("fsdp", 1), recompute=paths)
    found = priced(graph, stated.strategy(solve(stated.problem).answer), mesh, sizes=Sizes(bundle=1, ahead=1))
    events = [e for e in found.events if e.phase in ("backward", "recompute")]

    def places(block: str, phase: str, *kinds: Kind) -> list[int]:
        return [n for n, e in enumerate(events) if e.module.startswith(block) and e.phase == phase and e.kind in kinds]

    for before, after in pairwise(paths):
        gathers = places(before, "recompute", Kind.GATHER)
        assert min(gathers) < min(places(after, "backward", Kind.INPUT)) < max(gathers)
        forward = sum(
            e.kind is Kind.GATHER and e.module.startswith(before) for e in found.events if e.phase == "forward"
        )
        assert len(gathers) == forward - 1  # no backward pass reads the last product's bias
    validate_program(found.program)


def test_inference_recomputes_nothing(graph: Graph, whole: Strategy) -> None:
    events = priced(graph, replace(whole, recomputed=block_paths(graph)), MESH, training=False).events
    assert {e.phase for e in events} == {"forward"}


def test_an_unknown_block_is_refused(graph: Graph, whole: Strategy) -> None:
    with pytest.raises(LoweringError, match="elsewhere"):
        priced(graph, replace(whole, recomputed=("elsewhere.0",)), MESH)


@pytest.fixture(scope="module")
def wide() -> Graph:
    """Its products are expensive for their size."""
    with torch.device("meta"):
        model, args, kwargs = zoo.build("gpt", layers=2, width=512, heads=4, seq=64, vocab=128, batch=16)
        return capture(model, args, kwargs)


def _whole(graph: Graph) -> Strategy:
    splits = {op.name: (None,) * len(MESH.axes) for op in graph.ops}
    return Strategy(MESH.names, splits, dict.fromkeys(graph.sources, (Replicate(),) * len(MESH.axes)))


def _kept_by(graph: Graph, strategy: Strategy) -> Counter[str]:
    """Bytes of blocks that live from the forward pass into the backward pass, by the operator that made them."""
    found = priced(graph, strategy, MESH)
    first = next(n for n, e in enumerate(found.events) if e.phase == "backward")
    makers = {name: op.target.split(".")[1] for op in graph.ops for name in (*op.outputs, op.name) if name}
    use, kept = memory(found.program, MESH.device), Counter[str]()
    for storage in use.storages:
        if storage.kind == ACTIVATIONS and storage.born <= first <= storage.dies and storage.module[:6] == "blocks":
            kept[makers[storage.what]] += storage.bytes
    return +kept


def test_lightly_only_what_is_cheap_runs_again(wide: Graph) -> None:
    """Norms and activations; products and attention keep their results, sums of the residual stream theirs."""
    graph, whole, paths = wide, _whole(wide), block_paths(wide)
    light = replace(whole, recomputed=paths, lightly=frozenset(paths))
    events = [e for e in priced(graph, light, MESH).events if e.phase == "recompute" and e.seconds > 0]
    targets = {op.name: op.target.split(".")[1] for op in graph.ops}
    assert Counter(targets[e.name] for e in events) == {"layer_norm": 2 * len(paths), "gelu": len(paths)}
    plain, kept = _kept_by(graph, whole), _kept_by(graph, light)
    assert {target for target in plain if plain[target] > kept[target]} == {"layer_norm", "gelu"}
    assert all(kept[target] <= plain[target] for target in kept)
    validate_program(priced(graph, light, MESH).program)


def test_lightly_lies_between_everything_and_nothing(wide: Graph) -> None:
    graph, whole, paths = wide, _whole(wide), block_paths(wide)
    every = [whole, replace(whole, recomputed=paths, lightly=frozenset(paths)), replace(whole, recomputed=paths)]
    peaks, seconds = zip(
        *((memory_of(graph, s, MESH).peak, priced(graph, s, MESH).seconds) for s in every), strict=True
    )
    assert sorted(peaks, reverse=True) == list(peaks)
    assert sorted(seconds) == list(seconds)
    assert len({*peaks}) == len({*seconds}) == 3
