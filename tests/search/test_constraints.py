"""What users insist on holds: of one block alone, of inputs, of axes; and what cannot hold is refused with the way out."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Replicate, Shard

from program.steps import priced
from shardwright.cluster import meshes, parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.search.choose import solve
from shardwright.search.constraints import constraints, meant_meshes
from shardwright.search.formulate import formulate
from shardwright.zoo.reference import resolve

CLUSTER = parse_cluster("8xH100")
SHAPES = meshes(CLUSTER, 2)
MESH = SHAPES[-1]


@pytest.fixture(scope="module")
def gpt() -> Graph:
    resolved = resolve("gpt:small,layers=4", batch=8)
    return capture(resolved.model, resolved.args, resolved.kwargs)


def _planned(graph: Graph, pins: tuple[str, ...], forbidden: tuple[str, ...] = ()):
    options = Options(baselines=(), fewer_devices=False, pins=pins, forbidden=forbidden)
    return plan_graph(graph, CLUSTER, options).stages[0].strategy


def test_a_pin_of_one_of_several_equal_blocks_holds_for_that_one(gpt: Graph) -> None:
    """Blocks share decisions unless one of them is asked something of: any of them, not only the first."""
    strategy = _planned(gpt, ("blocks.2.feed.up.weight=S1,S0", "blocks.3.feed.down=k,none"))
    weights = {p.paths[0]: strategy.resting[p.tensor] for p in gpt.parameters}
    assert weights["blocks.2.feed.up.weight"] == (Shard(1), Shard(0))
    assert weights["blocks.1.feed.up.weight"] != (Shard(1), Shard(0))
    down = {op.module: strategy.splits[op.name] for op in gpt.ops if op.module.endswith("feed.down")}
    assert down["blocks.3.feed.down"] == ("k", None)
    assert down["blocks.0.feed.down"] != ("k", None)


def test_blocks_go_on_sharing_decisions_where_all_are_asked_alike(gpt: Graph) -> None:
    assert constraints(gpt, MESH.names, ["blocks.*.feed.up.weight=S1,S0"], []).fold
    assert not constraints(gpt, MESH.names, ["blocks.2.feed.up.weight=S1,S0"], []).fold
    assert not constraints(gpt, MESH.names, [], [f"blocks.1.*@{MESH.names[0][0]}"]).fold


def test_an_input_arrives_as_it_is_pinned_and_what_that_costs_is_priced(gpt: Graph) -> None:
    """What the pin adds to the sum of the search is what it adds to the events of a step."""
    name = next(i.tensor for i in gpt.inputs if i.tensor)
    free = formulate(gpt, MESH)
    best = solve(free.problem)
    before = best.cost, priced(gpt, free.strategy(best.answer), MESH).seconds
    for layout, text in (((Shard(1), Replicate()), "S1,R"), ((Shard(0), Shard(0)), "S0,S0")):
        stated = formulate(gpt, MESH, within=constraints(gpt, MESH.names, [f"{name}={text}"], []))
        solution = solve(stated.problem)
        strategy = stated.strategy(solution.answer)
        assert strategy.resting[name] == layout
        added = solution.cost - before[0]  # below zero where the cut that arrives need not be made
        assert priced(gpt, strategy, MESH).seconds - before[1] == pytest.approx(added, rel=0.05, abs=1e-8)


def test_constraints_choose_among_meshes_by_their_axes() -> None:
    assert [len(mesh.names) for mesh in meant_meshes(SHAPES, ["x=S0,R"], [])] == [2]
    assert [len(mesh.names) for mesh in meant_meshes(SHAPES, ["x=S0"], [])] == [1]
    assert list(meant_meshes(SHAPES, [], [f"x@{MESH.names[1][0]}"])) == [MESH]
    assert len(meant_meshes(SHAPES, [], [])) == len(SHAPES)
    with pytest.raises(ShardwrightError, match="No mesh") as caught:
        meant_meshes(SHAPES, ["x=S0,R,R"], [])
    assert "max-axes" in caught.value.remedy


@pytest.mark.parametrize(
    ("pin", "message", "remedy"),
    [
        ("blocks.*.feed.up.bias=R,S1", "without a part of", "keep it whole"),
        ("blocks.*.feed.up=nonsense,none", "none of its splits", "its loops"),
        ("nowhere=R,R", "matches no parameter, no input and no operator", "explain"),
    ],
)
def test_what_cannot_hold_is_refused_with_the_way_out(gpt: Graph, pin: str, message: str, remedy: str) -> None:
    with pytest.raises(ShardwrightError, match=message) as caught:
        _planned(gpt, (pin,))
    assert remedy in caught.value.remedy
