"""Programs of hand-made strategies: shared changes, kept layouts, buckets, regathering, issue order."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from program.steps import issued, priced
from shardwright.cluster import Axis, Mesh, mesh_of, parse_cluster
from shardwright.costs.pricing import Priced
from shardwright.errors import LoweringError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.operators.strategy import Strategy
from shardwright.program import COMPUTE, Kind, Sizes
from shardwright.program.dataflow import LayoutChange

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Two(torch.nn.Module):
    """Two products that read one tensor, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(8, 16))
        self.a, self.b = torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x * self.scale)
        return (self.a(h) * self.b(h)).sum()


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        return capture(Two(), (torch.empty(8, 16),))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return mesh_of(parse_cluster("2xH200"))


def _loop(graph: Graph, op: str, output: object, weight: object | None = None) -> str:
    """The loop of an operator whose first output is placed so (and whose last input, if asked for)."""
    chosen = next(o for o in graph.ops if o.name == op)
    for loop in analyse(chosen, graph.tensors).loops:
        if loop.outputs[0] == output and (weight is None or loop.inputs[-1] == weight):
            return loop.name
    raise AssertionError(f"{op} has no such loop")


def _by_batch(graph: Graph, rest: object = R, **changes: object) -> Strategy:
    """Everything cuts the rows; the sum leaves partial sums."""
    splits = {op.name: (_loop(graph, op.name, S0),) for op in graph.ops if op.name != "sum"}
    splits["sum"] = (next(n.name for n in analyse(graph.ops[-1], graph.tensors).loops if n.inputs[0] == S0),)
    resting = {p.tensor: (rest,) for p in graph.parameters} | {"p_scale": (S0,)}
    resting |= {i.tensor: (S0,) for i in graph.inputs if i.tensor}
    return Strategy((("gpu", 2),), splits, resting, **changes)  # type: ignore[arg-type]


def _kinds(found: Priced, phase: str) -> list[str]:
    return [e.collective for e in found.events if e.collective and e.phase == phase]


def test_data_parallel_reduces_one_bucket_and_the_loss(graph: Graph, mesh: Mesh) -> None:
    found = priced(graph, _by_batch(graph), mesh)
    assert _kinds(found, "forward") == ["all_reduce"]  # the loss; its gradient needs nothing
    assert _kinds(found, "backward") == ["all_reduce"]
    assert [set(bucket.tensors) for bucket in found.program.buckets] == [{"p_a_weight", "p_b_weight"}]
    weights = 2 * 16 * 16 * 4
    assert found.communication == {("all_reduce", "gpu"): (2, weights + 4)}
    assert found.events[-1].kind == "update"


def test_full_buckets_leave_before_the_backward_pass_ends(graph: Graph, mesh: Mesh) -> None:
    found = priced(graph, _by_batch(graph), mesh, sizes=Sizes(first_bucket=16 * 16 * 4))
    assert [bucket.tensors for bucket in found.program.buckets] == [
        ("p_b_weight",),
        ("p_a_weight",),
    ]  # reverse order of use
    first = next(i for i, e in enumerate(found.events) if e.kind == "reduce")
    assert any(e.kind in (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT) for e in found.events[first:])


def _on_two_axes(strategy: Strategy, weights: tuple, axis: int = 1) -> Strategy:
    """A strategy of one axis as the fast (or slow) one of two, the other cutting nothing."""
    both = lambda one, other: (other, one) if axis == 1 else (one, other)
    splits = {name: both(split[0], None) for name, split in strategy.splits.items()}
    resting = {name: both(layout[0], R) for name, layout in strategy.resting.items()}
    resting |= {"p_a_weight": weights, "p_b_weight": weights}
    return Strategy((("node", 2), ("gpu", 2)), splits, resting, regathered=strategy.regathered)


def test_replicas_on_two_axes_are_summed_leg_by_leg(graph: Graph, mesh: Mesh) -> None:
    """The second bucket's start moves the first one on to its second leg, on a stream of its own."""
    axes = (Axis("node", 2, 1e-12, 1e6), Axis("gpu", 2, 1e-12, 1e9))
    found = priced(
        graph, _on_two_axes(_by_batch(graph), (R, R)), Mesh(axes, mesh.device), sizes=Sizes(bucket=1, first_bucket=1)
    )
    reductions = [(i, e) for i, e in enumerate(found.events) if e.kind == "reduce"]
    legs = [(e.collective, e.stream, e.name) for _, e in reductions if e.name != "p_scale"]
    first, second = "p_b_weight", "p_a_weight"
    assert legs[:3] == [
        ("reduce_scatter", "gpu", first),
        ("reduce_scatter", "gpu", second),
        ("all_reduce", "node", first),
    ]
    assert sorted(legs[3:]) == [
        ("all_gather", "gpu", second),
        ("all_gather", "gpu", first),
        ("all_reduce", "node", second),
    ]
    weight = 16 * 16 * 4
    assert [e.bytes for _, e in reductions if e.name == first] == [weight, weight // 2, weight]
    number = {(e.collective, e.name): i for i, e in reductions}
    assert found.events[number["all_reduce", first]].after == (number["reduce_scatter", first],)
    awaited = [
        i for i, e in enumerate(found.events) if e.kind is Kind.AWAIT and number["all_gather", second] in e.after
    ]
    assert len(awaited) == 1 and awaited[0] < len(found.events) - 1  # the update comes after the last leg


def test_a_gather_behind_a_cut_is_started_ahead(graph: Graph, mesh: Mesh) -> None:
    """Rests cut along the slow axis, is used cut along the fast one: half of it is gathered, ahead of use."""
    axes = tuple(Axis(name, 2, 1e-6, 1e9) for name in ("node", "gpu"))
    strategy = _on_two_axes(_by_batch(graph), (S1, R))
    columns = {name: (None, _loop(graph, name, S1, S0)) for name in ("linear", "linear_1")}
    found = priced(graph, Strategy(strategy.axes, strategy.splits | columns, strategy.resting), Mesh(axes, mesh.device))
    changes = [node for node in found.program.flow.nodes if isinstance(node, LayoutChange) and node.reads]
    taken = [[step.kind for step in node.route.forward] for node in changes]
    assert taken == [["slice", "all_gather"]] * 2 and [node.ahead for node in changes] == [1, 1]
    first_product = next(i for i, e in enumerate(found.events) if e.name == "linear")
    gathered = [e for e in found.events[:first_product] if e.collective == "all_gather" and e.module.endswith("weight")]
    assert [(e.name, e.bytes) for e in gathered] == [("2 parameters", 16 * 16 * 4)]  # both in one, half of each


def test_sharded_parameters_are_gathered_and_their_gradients_scattered(graph: Graph, mesh: Mesh) -> None:
    alone = Sizes(bundle=1)  # each by itself
    kept = priced(graph, _by_batch(graph, S0), mesh, sizes=alone)
    assert kept.communication["all_gather", "gpu"][0] == 2
    assert kept.communication["reduce_scatter", "gpu"][0] == 2
    assert not kept.program.buckets and not any(slot.role == "flat" for slot in kept.program.slots)
    freed = priced(graph, _by_batch(graph, S0, regathered=frozenset({"p_a_weight", "p_b_weight"})), mesh, sizes=alone)
    assert freed.communication["all_gather", "gpu"][0] == 4
    started = [e.name for e in freed.events if e.collective == "all_gather"]
    assert started == ["p_a_weight", "p_b_weight", "p_b_weight", "p_a_weight"]
    events = issued(freed)
    first_product = next(i for i, e in enumerate(events) if e.name == "linear")
    assert events[first_product - 1].name == "p_b_weight"  # both gathers are under way before the first product


def test_the_next_gather_is_started_ahead_however_large_it_is(graph: Graph, mesh: Mesh) -> None:
    """More bytes are under way than may be, the one that is awaited not counted: still one is started."""
    names = frozenset({"p_a_weight", "p_b_weight"})
    found = priced(graph, _by_batch(graph, S0, regathered=names), mesh, sizes=Sizes(bundle=1, ahead=1))
    events = issued(found)
    for phase, use in (("forward", "linear"), ("backward", "linear_1")):
        gathers = [i for i, e in enumerate(events) if e.collective == "all_gather" and e.phase == phase]
        product = next(i for i, e in enumerate(events) if e.name == use and e.phase == phase)
        assert len(gathers) == 2 and gathers[1] < product


def test_the_second_axis_of_the_next_parameter_is_gathered_beside_the_use_of_this_one(graph: Graph, mesh: Mesh) -> None:
    """Cut along both axes: while the second weight's product waits its first gather is awaited and its second begun."""
    axes = tuple(Axis(name, 2, 1e-6, 1e9) for name in ("node", "gpu"))
    strategy = _on_two_axes(_by_batch(graph), (S0, S0))
    sizes = Sizes(bundle=1, ahead=1)
    found = priced(graph, strategy, Mesh(axes, mesh.device), sizes=sizes)
    gathers = [(e.name, e.kind) for e in found.events if e.collective == "all_gather" and e.phase == "forward"]
    assert gathers == [(name, Kind.GATHER) for name in ("p_a_weight", "p_b_weight", "p_a_weight", "p_b_weight")]
    scatters = [(e.name, e.kind) for e in found.events if e.collective == "reduce_scatter"]  # their gradients likewise
    assert scatters == [(name, Kind.SCATTER) for name in ("p_b_weight", "p_a_weight", "p_b_weight", "p_a_weight")]
    bundled = priced(graph, strategy, Mesh(axes, mesh.device))
    together = [e for e in bundled.events if e.collective == "all_gather"]
    assert [(e.name, e.bytes) for e in together] == [("2 parameters", 1024), ("2 parameters", 2048)]


def test_a_bundle_is_packed_gathered_and_unpacked_before_the_first_of_it_is_used(graph: Graph, mesh: Mesh) -> None:
    weight = 16 * 16 * 4
    found = priced(graph, _by_batch(graph, S0, regathered=frozenset({"p_a_weight"})), mesh)
    assert found.communication["all_gather", "gpu"] == (2, 3 * weight)  # both for the forward pass, one again
    assert found.communication["reduce_scatter", "gpu"] == (1, 2 * weight)
    first_product = next(i for i, e in enumerate(found.events) if e.name == "linear")
    before = [(e.kind, e.collective) for e in found.events[:first_product] if e.name == "2 parameters"]
    assert before == [(Kind.PACK, ""), (Kind.GATHER, "all_gather"), (Kind.AWAIT, ""), (Kind.UNPACK, "")]
    flats = [slot.bytes for slot in found.program.slots if slot.role == "flat"]
    assert flats == [weight, 2 * weight, 2 * weight]  # shards of half the bytes, all of them; and the gradients
    scatter = next(i for i, e in enumerate(found.events) if e.collective == "reduce_scatter")
    assert found.events[scatter - 1].kind == "pack" and found.events[scatter - 1].name == "2 gradients"
    last_product = max(i for i, e in enumerate(found.events) if e.name == "linear" and e.phase == "backward")
    assert scatter > last_product


def test_readers_with_one_need_share_a_change(graph: Graph, mesh: Mesh) -> None:
    """relu leaves rows cut; both products want the whole and cut their output features."""
    strategy = _by_batch(graph)
    columns = {name: (_loop(graph, name, S1, S0),) for name in ("linear", "linear_1")}
    mul = {"mul_1": (_loop(graph, "mul_1", S1),)}
    total = {"sum": (next(n.name for n in analyse(graph.ops[-1], graph.tensors).loops if n.inputs[0] == S1),)}
    resting = strategy.resting | {"p_a_weight": (S0,), "p_b_weight": (S0,)}
    shared = Strategy(strategy.axes, strategy.splits | columns | mul | total, resting)
    found = priced(graph, shared, mesh)
    assert found.communication["all_gather", "gpu"] == (1, 8 * 16 * 4)
    gathers = [e for e in found.events if e.collective == "all_gather"]
    assert [e.name for e in gathers] == ["relu"]
    # the gradients of both readers are added first, then travel back together
    assert found.communication["reduce_scatter", "gpu"] == (1, 8 * 16 * 4)
    added = next(i for i, e in enumerate(found.events) if e.kind == "accumulate")
    assert added < next(i for i, e in enumerate(found.events) if e.collective == "reduce_scatter")


def test_a_kept_layout_is_made_once_for_all_readers(graph: Graph, mesh: Mesh) -> None:
    strategy = _by_batch(graph)
    alone = dict.fromkeys(("linear", "linear_1", "mul_1", "sum"), (None,))
    kept = Strategy(strategy.axes, strategy.splits | alone, strategy.resting, kept={"relu": (R,)})
    found = priced(graph, kept, mesh)
    assert [e.name for e in found.events if e.collective == "all_gather"] == ["relu"]


def test_communication_waits_for_what_was_issued_before_it(graph: Graph, mesh: Mesh) -> None:
    found = priced(graph, _by_batch(graph), mesh)
    last = -1
    for number, event in enumerate(found.events):
        if event.stream == COMPUTE:
            last = number
        elif last >= 0:
            assert last in event.after


def test_inference_has_no_way_back(graph: Graph, mesh: Mesh) -> None:
    found = priced(graph, _by_batch(graph), mesh, training=False)
    assert {e.phase for e in found.events} == {"forward"}
    assert not found.program.backward


def test_an_unknown_loop_and_a_missing_split_are_named(graph: Graph, mesh: Mesh) -> None:
    strategy = _by_batch(graph)
    with pytest.raises(LoweringError, match=r"linear.*no loop 'nope'"):
        priced(graph, Strategy(strategy.axes, strategy.splits | {"linear": ("nope",)}, strategy.resting), mesh)
    without = {k: v for k, v in strategy.splits.items() if k != "relu"}
    with pytest.raises(LoweringError, match=r"relu.*no split"):
        priced(graph, Strategy(strategy.axes, without, strategy.resting), mesh)
    with pytest.raises(LoweringError, match="no resting layout for 'x'"):
        resting = {k: v for k, v in strategy.resting.items() if k != "x"}
        priced(graph, Strategy(strategy.axes, strategy.splits, resting), mesh)
