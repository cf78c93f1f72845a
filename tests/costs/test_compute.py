"""Prices of operators: shares of the work, backward by what carries a gradient, calibration used where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shardwright.cluster import Axis, Curve, Device, Mesh, Profile, mesh_of, parse_cluster
from shardwright.costs import collectives, dispatch_seconds, op_times, state_bytes, step_seconds
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph, Op
from shardwright.operators import analyse
from shardwright.operators.rules import Replicate
from shardwright.operators.strategy import Strategy
from shardwright.simulator import simulate
from shardwright.zoo.reference import resolve

DEVICE = Device("d", "cuda", 10**11, 1e12, 5e-6, (("float32", 1e13), ("bfloat16", 1e14)))
LINE = Axis("gpu", 4, 1e-6, 1e11)
MESH = Mesh((LINE,), DEVICE)


def graph_of(function, *args: torch.Tensor) -> Graph:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(4096, 4096, device="meta"))

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return function(self.weight, *inputs)

    return capture(Model(), args, {})


def price(graph: Graph, name: str, split: tuple, mesh: Mesh = MESH, **options) -> np.ndarray:
    op = next(op for op in graph.ops if name in op.target)
    return op_times(op, analyse(op, graph.tensors), graph.tensors, [split], mesh, **options)[0]


def loops(graph: Graph, op: Op) -> list[str]:
    return [loop.name for loop in analyse(op, graph.tensors).loops if loop.divides]


def test_a_linear_layer_divides_its_work_and_pays_twice_backward() -> None:
    x = torch.empty(8192, 4096, device="meta")
    graph = graph_of(lambda w, x: torch.nn.functional.linear(torch.nn.functional.linear(x, w), w).sum(), x)
    op = [op for op in graph.ops if "linear" in op.target][1]  # its input carries a gradient too
    rules = analyse(op, graph.tensors)
    names = [loop.name for loop in rules.loops if loop.divides]
    times = op_times(op, rules, graph.tensors, [(None,), *((name,) for name in names)], MESH)
    ideal = 2 * 8192 * 4096 * 4096 / 1e13
    assert ideal < times[0, 0] < 2 * ideal
    assert times[0, 1] == pytest.approx(2 * times[0, 0], rel=0.15)
    for row in times[1:]:  # every loop of a product may be cut, each to about a quarter
        assert row[0] == pytest.approx(times[0, 0] / 4, rel=0.2)
    assert not op_times(op, rules, graph.tensors, [(None,)], MESH, training=False)[0, 1]


def test_an_input_without_gradient_costs_one_product_less() -> None:
    x = torch.empty(8192, 4096, device="meta")
    graph = graph_of(lambda w, x: torch.nn.functional.linear(x, w).sum(), x)
    times = price(graph, "linear", (None,))
    assert times[1] == pytest.approx(times[0], rel=0.15)


def test_views_are_free_unless_they_copy() -> None:
    x = torch.empty(256, 4096, device="meta")
    graph = graph_of(lambda w, x: (x @ w).transpose(0, 1).relu().sum(), x)
    assert not price(graph, "transpose", (None,)).any()
    assert price(graph, "transpose", (None,), copies="copy")[0] > 0


def test_elementwise_is_bound_by_memory() -> None:
    x = torch.empty(8192, 4096, device="meta")
    graph = graph_of(lambda w, x: (x @ w).relu().sum(), x)
    forward = price(graph, "relu", (None,))[0]
    assert forward == pytest.approx(2 * 4 * 8192 * 4096 / 1e12, rel=0.5)


def test_exchanges_of_a_cut_softmax_are_priced() -> None:
    x = torch.empty(8192, 4096, device="meta")
    graph = graph_of(lambda w, x: torch.softmax(x @ w, -1).sum(), x)
    op = next(op for op in graph.ops if "softmax" in op.target)
    rules = analyse(op, graph.tensors)
    cut = next(loop.name for loop in rules.loops if loop.exchanges)
    free = next(loop.name for loop in rules.loops if loop.divides and not loop.exchanges)
    times = op_times(op, rules, graph.tensors, [(free,), (cut,)], MESH)
    statistic = float(collectives.all_reduce(8192 * 4, LINE))
    assert times[1, 0] - times[0, 0] == pytest.approx(len(rules.by_name[cut].exchanges) * statistic, rel=0.05)


def test_calibration_replaces_assumptions_and_says_so() -> None:
    x = torch.empty(8192, 4096, device="meta")
    graph = graph_of(lambda w, x: torch.nn.functional.linear(x, w).sum(), x)
    curve = Curve(("m", "n", "k"), ((8192.0, 4096.0, 4096.0),), (10.0,))
    profile = Profile("measured by hand", (("matmul/float32/forward", curve),), (("linear", 1e-5, 3e-5),))
    device = replace(DEVICE, profile=profile)
    mesh = Mesh((LINE,), device)
    assert price(graph, "linear", (None,), mesh)[0] == pytest.approx(10 * 2 * 8192 * 4096 * 4096 / 1e13)
    assert mesh.calibration == "measured by hand" != MESH.calibration
    op = next(op for op in graph.ops if "linear" in op.target)
    # Timed with the gradients of input, weight and bias; here only the weight wants one.
    assert dispatch_seconds(op, graph.tensors, (1, 0, 1, 1), device) == pytest.approx((1e-5, 1e-5))


def test_curves_interpolate_between_and_hold_outside() -> None:
    curve = Curve(("m", "n"), ((1.0, 1.0), (1.0, 4.0), (4.0, 1.0), (4.0, 4.0)), (1.0, 4.0, 4.0, 16.0))
    at = curve(np.array([[1.0, 1.0], [4.0, 4.0], [2.0, 2.0], [100.0, 100.0]]))
    assert at == pytest.approx([1.0, 16.0, 4.0, 16.0], rel=0.02)


def test_bytes_cost_a_fixed_time_and_a_rate_however_few_sizes_were_measured() -> None:
    """Of 2 µs and twice the ideal rate, two far points say everything; the fixed cost does not grow beyond them."""
    sizes = np.array([1e4, 1e5, 1e6, 1e7, 1e8, 1e10])
    ratios = 2.0 + 2e-6 * 1e12 / sizes
    measured = Curve(("bytes",), ((1e5,), (1e8,)), (float(ratios[1]), float(ratios[4])))
    assert measured(sizes[:, None]) == pytest.approx(ratios, rel=1e-9)
    small = Curve(("bytes",), ((1e4,), (1e5,)), (float(ratios[0]), float(ratios[1])))
    assert small(sizes[:, None]) == pytest.approx(ratios, rel=1e-9)
    alone = Curve(("bytes",), ((1e5,), (1e5,)), (3.0, 5.0))  # a rate is all that one size tells
    assert alone(sizes[:, None]) == pytest.approx(4.0)
    large = Curve(("bytes",), ((1.3e8,), (2e8,)), (3.3, 2.3))  # noise: as if 55 ms were fixed and bytes cost nothing
    assert large(sizes[:4, None]) == pytest.approx(3.3)


def test_the_gradient_of_an_operator_nobody_measured_is_one_kernel() -> None:
    """It reads two tensors and writes one; what a product of three with all its gradients takes says nothing about it."""
    graph = graph_of(lambda w, x: torch.nn.functional.hardtanh(w).sum(), torch.empty(2, device="meta"))
    flat = {
        f"elementwise/float32/{step}": Curve(("bytes",), ((1.0,),), (r,))
        for step, r in (("forward", 1.0), ("backward", 6.0))
    }
    mesh = Mesh((LINE,), replace(DEVICE, profile=Profile("by hand", tuple(flat.items()))))
    op = next(op for op in graph.ops if "hardtanh" in op.target)
    amount = 4 * graph.tensors[op.inputs[0]].elements
    assert price(graph, "hardtanh", (None,), mesh) == pytest.approx(
        [2 * amount / DEVICE.bandwidth, 3 * amount / DEVICE.bandwidth]
    )


@pytest.mark.parametrize("kind", sorted(collectives.SECONDS))
def test_collectives_grow_with_bytes_and_vanish_on_one_device(kind: str) -> None:
    amounts = np.array([1e3, 1e6, 1e9])
    seconds = collectives.SECONDS[kind](amounts, LINE)
    assert (np.diff(seconds) > 0).all() and seconds[2] < 3 * 1e9 / LINE.bandwidth
    assert not np.any(collectives.SECONDS[kind](amounts, Axis("one", 1, 1e-6, 1e9)))


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    both = collectives.reduce_scatter(1e9, LINE) + collectives.all_gather(1e9, LINE)
    assert collectives.all_reduce(1e9, LINE) == pytest.approx(both)


def test_measured_collectives_are_used() -> None:
    fitted = replace(LINE, fits=(("all_gather", 1e-3, 1e8),))
    assert collectives.all_gather(1e6, fitted) == pytest.approx(2e-3 + 0.75 * 1e6 / 1e8)


def test_optimizers() -> None:
    device = parse_cluster("H200").device
    adamw, host = step_seconds("adamw", [10**9], device)
    momentum, _ = step_seconds("momentum", [10**9], device)
    assert adamw > momentum > step_seconds("sgd", [10**9], device)[0] > 0 and host > 0
    assert state_bytes("adamw", [100]) == 204 and state_bytes("momentum", [100]) == 100 and state_bytes("sgd", [9]) == 0
    with pytest.raises(ShardwrightError, match="lion"):
        state_bytes("lion", [1])


def test_the_measured_h200_prices_a_large_product_near_its_known_rate() -> None:
    x = torch.empty(8192, 4096, device="meta", dtype=torch.bfloat16)
    graph = graph_of(lambda w, x: torch.nn.functional.linear(x, w.to(torch.bfloat16)).float().sum(), x)
    seconds = price(graph, "linear", (None,), mesh_of(parse_cluster("H200")))[0]
    assert 550e12 < 2 * 8192 * 4096 * 4096 / seconds < 900e12


def calibrated(**ratios: float) -> Mesh:
    """A device whose curves have one ratio each, by kernel and pass."""
    features = {"convolution": 4, "grouped": 5, "attention_masked": 4}
    curves = []
    for name, ratio in ratios.items():
        kernel, step = name.rsplit("_", 1)
        point = (1.0,) * features.get(kernel, 1)
        curves.append((f"{kernel}/float32/{step}", Curve(tuple("abcde"[: len(point)]), (point,), (ratio,))))
    return replace(MESH, device=replace(DEVICE, profile=Profile("by hand", tuple(curves), kernel_floor=1e-9)))


@pytest.mark.parametrize(("groups", "times"), [(1, 1.0), (4, 3.0)])
def test_groups_of_a_convolution_have_a_curve_of_their_own(groups: int, times: float) -> None:
    """Libraries compute them one after the other: priced like one dense convolution they were a third too cheap."""
    x, filters = torch.empty(8, 64, 100, device="meta"), torch.empty(64, 64 // groups, 3, device="meta")
    graph = graph_of(lambda w, x, f: torch.nn.functional.conv1d(x, f, groups=groups).sum() * w.sum(), x, filters)
    alike = price(
        graph, "conv1d", (None,), calibrated(convolution_forward=1.0)
    )  # a profile from before they were measured
    found = price(graph, "conv1d", (None,), calibrated(convolution_forward=1.0, grouped_forward=3.0))
    assert found[0] == pytest.approx(times * alike[0])


def test_a_pointwise_convolution_is_priced_by_how_its_positions_are_aligned() -> None:
    """Its rows are the positions of an image: of 7 x 7 no fast kernel takes them, and both were priced alike."""
    curve = Curve(("m", "n", "k", "alignment"), ((1e4, 64.0, 64.0, 1.0), (1e4, 64.0, 64.0, 16.0)), (4.0, 1.0))
    profile = Profile("test", (("pointwise/float32/forward", curve),))
    mesh, ratios = Mesh((LINE,), replace(DEVICE, profile=profile)), []
    for image, kernel in ((32, 1), (35, 1), (32, 3)):
        x, filters = (torch.empty(*s, device="meta") for s in ((64, 64, image, image), (64, 64, kernel, kernel)))
        graph = graph_of(lambda w, x, f: torch.nn.functional.conv2d(x, f, padding="same").sum() * w.sum(), x, filters)
        ratios.append(price(graph, "conv2d", (None,), mesh)[0] / price(graph, "conv2d", (None,))[0] * 32**2 / image**2)
    assert ratios[1] > 3 * ratios[0]
    assert ratios[2] == 1.0  # other filters have another curve, and there is none


def test_a_depthwise_convolution_is_priced_by_its_shape_not_its_bytes() -> None:
    """As many bytes in few large images as in many small ones: twice the time, by the same curve before."""
    points = ((1e2, 1e4, 9.0, 1.0), (1e4, 1e2, 9.0, 1.0))
    curve = Curve(("images", "positions", "area", "stride"), points, (1.0, 3.0))
    mesh = Mesh((LINE,), replace(DEVICE, profile=Profile("test", (("channelwise/float32/forward", curve),))))
    found = []
    for channels, image in ((64, 128), (1024, 32)):
        x, filters = (
            torch.empty(16, channels, image, image, device="meta"),
            torch.empty(channels, 1, 3, 3, device="meta"),
        )
        graph = graph_of(
            lambda w, x, f: torch.nn.functional.conv2d(x, f, padding=1, groups=f.shape[0]).sum() * w.sum(), x, filters
        )
        found.append(price(graph, "conv2d", (None,), mesh)[0])
    assert found[1] > 1.5 * found[0]


@pytest.mark.parametrize(("width", "ratio"), [(2048, 1.0), (1024, 1.0), (128, 5.0), (64, 5.0), (362, 3.0)])
def test_narrow_rows_are_priced_between_the_widths_that_were_measured(width: int, ratio: float) -> None:
    """A norm's weight gradient sums over rows; with few columns most of a GPU idles, and it took three times as long."""
    x = torch.empty(10_000, width, device="meta")
    graph = graph_of(lambda w, x: torch.nn.functional.layer_norm(x, (width,)).sum() * w.sum(), x)
    found = price(graph, "layer_norm", (None,), calibrated(layer_norm_forward=1.0, layer_norm_narrow_forward=5.0))
    assert found[0] == pytest.approx(
        ratio * price(graph, "layer_norm", (None,), calibrated(layer_norm_forward=1.0))[0], rel=0.01
    )


def test_a_learned_bias_of_attention_costs_its_gradient() -> None:
    q, bias = torch.empty(4, 2, 64, 16, device="meta"), torch.empty(1, 2, 64, 64, device="meta")
    ratios = {"attention_masked_forward": 1.0, "attention_masked_backward": 1.0, "attention_biased_forward": 1.0}
    mesh, seconds = calibrated(**ratios, attention_biased_backward=3.0), []
    for learned in (False, True):
        graph = graph_of(
            lambda w, q, b, learned=learned: torch.nn.functional.scaled_dot_product_attention(
                q * w.sum(), q, q, b * w.sum() if learned else b
            ).sum(),
            q,
            bias,
        )
        seconds.append(price(graph, "attention", (None,), mesh))
    assert seconds[0][0] == seconds[1][0]
    assert (
        seconds[1][1] - seconds[0][1] > 2 * 4 * 4 * 2 * 64 * 64 / 1e12
    )  # written for every score, and summed over the batch


def test_two_gradients_are_added_at_the_speed_of_the_device() -> None:
    """What the host takes to issue a kernel is no time of the device's: of small gradients it was four times theirs."""
    graph = graph_of(lambda w, x: (x @ w).relu().sum() + (x @ w).sum(), torch.empty(16, 4096, device="meta"))
    rest, splits = (Replicate(),), {op.name: (None,) for op in graph.ops}
    strategy = Strategy((("gpu", 1),), splits, dict.fromkeys(graph.sources, rest))
    mesh = replace(calibrated(add_forward=2.0), axes=(replace(LINE, size=1),))
    events = simulate(graph, strategy, mesh).ranks[0].events
    (added,) = [event.seconds for event in events if event.kind == "accumulate"]
    assert added == pytest.approx(2.0 * 3 * 4 * 4096 * 4096 / 1e12)


@pytest.mark.parametrize(("turned", "copied"), [(False, 0), (True, 2)])
def test_operands_that_matmul_copies_first_are_paid_for(turned: bool, copied: int) -> None:
    """Heads split off the last dim and turned to the front are no batch of matrices: attention written out was too cheap."""

    def scores(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        q = (x.view(4, 8, 2, 32).transpose(1, 2) if turned else x.view(4, 2, 8, 32)) * w[0, 0]
        return (q @ q.transpose(-1, -2)).sum()

    graph = graph_of(scores, torch.empty(4, 8, 64, device="meta"))
    rest, splits = (Replicate(),), {op.name: (None,) for op in graph.ops}
    strategy = Strategy((("gpu", 1),), splits, dict.fromkeys(graph.sources, rest))
    mesh = replace(calibrated(copy_forward=1e6, copy_rows_forward=1e6), axes=(replace(LINE, size=1),))
    (seconds,) = [
        e.seconds
        for e in simulate(graph, strategy, mesh).ranks[0].events
        if "matmul" in e.name and e.phase == "forward"
    ]
    assert round(seconds / (1e6 * 2 * 4 * 4 * 8 * 64 / 1e12)) == copied


@pytest.mark.parametrize("reference", ["moe:small", "bert:small", "wresnet50:small", "rnnlm:small"])
def test_what_a_split_costs_does_not_depend_on_the_others_priced_with_it(reference: str) -> None:
    resolved = resolve(reference, batch=8)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    mesh = mesh_of(parse_cluster("4xH200"), (4,))
    for op in {(op.target, str(op.args), op.inputs[:1]): op for op in graph.ops}.values():
        rules, splits = analyse(op, graph.tensors), [(None,), *((loop,) for loop in loops(graph, op))]
        together = op_times(op, rules, graph.tensors, splits, mesh)
        alone = [op_times(op, rules, graph.tensors, [split], mesh)[0] for split in splits]
        np.testing.assert_allclose(together, alone, rtol=1e-12, err_msg=op.name)


@pytest.mark.parametrize(("tokens", "kernel"), [(1024, "few"), (8192, "sorted")])
def test_the_gradient_of_a_table_depends_on_the_rows_looked_up(tokens: int, kernel: str) -> None:
    """Of a table of 300 MB and 1,024 tokens it took 56 µs and was priced at 630, as if as many rows were looked up."""
    ids = torch.empty(tokens, device="meta", dtype=torch.int64)
    graph = graph_of(lambda w, ids: torch.nn.functional.embedding(ids, w).sum(), ids)
    ratios = {"embedding_few_backward": 1.0, "embedding_sorted_backward": 1.0, "fill_forward": 1.0}
    once = price(graph, "embedding", (None,), calibrated(**ratios))[1]
    slower = price(graph, "embedding", (None,), calibrated(**ratios | {f"embedding_{kernel}_backward": 3.0}))[1]
    moved = 8 * tokens + (0 if kernel == "few" else 2 * 4 * 4096 * tokens)
    assert slower - once == pytest.approx(2 * moved / 1e12, rel=1e-3)
    before = price(graph, "embedding", (None,), calibrated(embedding_backward=1.0, elementwise_forward=1e-6))[1]
    assert before == pytest.approx((8 * tokens + 2 * 4 * 4096 * tokens + 4 * 4096**2) / 1e12, rel=1e-2)


@pytest.mark.parametrize(("shapes", "kernel"), [(((64, 1), (64, 64)), "broadcast"), (((64, 1), (1, 64)), "crossed")])
def test_operands_that_are_repeated_have_kernels_of_their_own(shapes: tuple, kernel: str) -> None:
    a, b = (torch.empty(100, *shape, device="meta") for shape in shapes)
    graph = graph_of(lambda w, a, b: (a + b).sum() * w.sum(), a, b)
    ratios = {"add_forward": 1.0, "broadcast_forward": 1.0, "crossed_forward": 1.0}
    once, slower = (
        price(graph, "aten.add", (None,), calibrated(**ratios | {f"{kernel}_forward": ratio}))[0]
        for ratio in (1.0, 3.0)
    )
    assert slower == pytest.approx(3 * once)
    assert price(graph, "aten.add", (None,), calibrated(add_forward=1.0))[0] == pytest.approx(once)


@pytest.mark.parametrize(("dim", "kernel"), [(2, "mean_narrow"), (1, "sum_narrow")])
def test_sums_over_short_rows_and_over_columns_are_told_apart(dim: int, kernel: str) -> None:
    """A sum over rows of 64 ran at an eighth of the memory's speed, priced like one over columns at three quarters."""
    x = torch.empty(4, 100, 32, device="meta")
    graph = graph_of(lambda w, x: (x * w.sum()).sum(dim).square().sum(), x)
    ratios = dict.fromkeys(("sum_forward", "mean_forward", "sum_narrow_forward", "mean_narrow_forward"), 1.0)
    op = next(op for op in graph.ops if f"{dim}" in str(op.args) and "sum" in op.target)
    tables = [calibrated(**ratios | {f"{kernel}_forward": ratio}) for ratio in (1.0, 3.0)]
    once, slower = (op_times(op, analyse(op, graph.tensors), graph.tensors, [(None,)], m)[0][0] for m in tables)
    assert slower == pytest.approx(3 * once)
