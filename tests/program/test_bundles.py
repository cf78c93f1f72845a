"""Bundles: parameters of one block, axis and dtype travel together until a bundle is full; everybody travels once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from shardwright import zoo
from shardwright.cluster import Mesh, mesh_of, parse_cluster
from shardwright.costs import collectives
from shardwright.costs.redistribute import collective_seconds, conversion, step_seconds
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.graph.repeats import span_of
from shardwright.program import Sizes
from shardwright.program import bundles as described
from shardwright.program.bundles import Bundles, Read, together

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model, args, kwargs = zoo.build("gpt", **(dict(zoo.entry("gpt").small) | {"layers": 3}))
        return capture(model, args, kwargs)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return mesh_of(parse_cluster("2x2xH100"))


def read(graph: Graph, tensor: str, operator: int, layout: tuple, mesh: Mesh) -> Read:
    meta = graph.tensors[tensor]
    return Read(tensor, operator, conversion(meta.shape, meta.dtype, layout, (R, R), mesh, meta.grad).route)


def bundles(graph: Graph, reads: list[Read], *args: object, full: int = Sizes().bundle, **kwargs: object) -> Bundles:
    return described.bundles(graph, reads, full, *args, **kwargs)  # type: ignore[arg-type]  # as they are


def in_order(graph: Graph, mesh: Mesh, layout: tuple = (R, S0)) -> list[Read]:
    first = {name: i for i, op in reversed(list(enumerate(graph.ops))) for name in op.inputs}
    used = sorted((first[p.tensor], p.tensor) for p in graph.parameters)
    return [read(graph, tensor, operator, layout, mesh) for operator, tensor in used]


def test_a_block_is_a_bundle_and_so_is_what_lies_between_blocks(graph: Graph, mesh: Mesh) -> None:
    reads = in_order(graph, mesh)
    found = bundles(graph, reads)
    assert found.gathers == found.scatters
    where = [{graph.parameter_of[reads[i].tensor].paths[0].rsplit(".", 99)[0] for i in b} for b in found.gathers]
    assert len(found.gathers) == 5  # the embeddings, three blocks, the last norm
    blocks = [{graph.parameter_of[reads[i].tensor].paths[0][:8] for i in b} for b in found.gathers]
    assert blocks[1:4] == [{"blocks.0"}, {"blocks.1"}, {"blocks.2"}], where


def test_a_recomputed_part_of_a_block_is_a_bundle_of_its_own(graph: Graph, mesh: Mesh) -> None:
    reads = in_order(graph, mesh)
    found = bundles(graph, reads, recomputed=["blocks.1.attention"])
    inside = span_of(graph, "blocks.1.attention")
    for bundle in found.gathers:
        assert len({reads[i].operator in inside for i in bundle}) == 1
    assert len(found.gathers) == 7


def test_whole_gradients_travel_apart_from_those_that_leave_at_once(graph: Graph, mesh: Mesh) -> None:
    reads = in_order(graph, mesh)
    late = frozenset(r.tensor for r in reads[::2])
    found = bundles(graph, reads, late)
    assert all(len({reads[i].tensor in late for i in bundle}) == 1 for bundle in found.scatters)
    assert found.gathers == bundles(graph, reads).gathers


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_everybody_travels_once_in_order_and_no_bundle_takes_more_when_full(data: st.DataObject) -> None:
    graph, mesh = _small(), mesh_of(parse_cluster("2x2xH100"))
    layouts = st.sampled_from([(R, S0), (S0, R), (S0, S0), (R, R)])
    reads = [
        read(graph, r.tensor, r.operator, data.draw(layouts), mesh)
        for r in in_order(graph, mesh)
        if data.draw(st.booleans())
    ]
    limit = data.draw(st.integers(1, 20000))
    found = bundles(graph, reads, full=limit)
    moving = [i for i, r in enumerate(reads) if r.steps.forward]
    for groups, way in ((found.gathers, "forward"), (found.scatters, "backward")):
        assert sorted(i for bundle in groups for i in bundle) == moving
        assert [bundle[0] for bundle in groups] == sorted(bundle[0] for bundle in groups)
        for bundle in groups:
            assert list(bundle) == sorted(bundle)
            steps = [getattr(reads[i].steps, way)[0] for i in bundle]
            assert len({step.axis for step in steps}) == 1
            assert sum(step.wire_bytes for step in steps[:-1]) < limit
            assert len(bundle) == 1 or max(step.wire_bytes for step in steps) < limit


def _small(known: list[Graph] = []) -> Graph:  # noqa: B006  # remembered
    if not known:
        with torch.device("meta"):
            model, args, kwargs = zoo.build("gpt", **zoo.entry("gpt").small)
            known.append(capture(model, args, kwargs))
    return known[0]


def test_a_bundle_pays_one_latency_for_all_its_bytes(graph: Graph, mesh: Mesh) -> None:
    steps = [r.steps.forward[0] for r in in_order(graph, mesh)]
    one = together(steps)
    assert one.wire_bytes == sum(step.wire_bytes for step in steps)
    apart = sum(step_seconds(step, mesh) for step in steps)
    saved = (len(steps) - 1) * (4 * mesh.device.launch_overhead + float(collectives.all_gather(0, mesh.axes[1])))
    assert collective_seconds(steps, mesh) == pytest.approx(apart - saved)
    assert together(steps[:1]) is steps[0]
