"""What the analysis derives, in the words of the papers: shards, halos, unreduced sums, exchanges, equal pieces."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.graph import Op, Ref, Tensor
from shardwright.operators import analyse
from shardwright.operators.deriving import derived, forget
from shardwright.operators.rules import Window

R, P = Replicate(), Partial("sum")


def rules(target, *arguments, outputs, grad=True, **keywords):
    """Rules of a call; tensors are given as shapes in lists, ``("int64", shape)`` for other types."""
    tensors = {}

    def convert(value):
        if isinstance(value, list):
            dtype, shape = (value[0], value[1:]) if value and isinstance(value[0], str) else ("float32", value)
            name = f"t{len(tensors)}"
            tensors[name] = Tensor(name, tuple(shape), dtype, grad and dtype.startswith("float"))
            return Ref(name)
        return tuple(convert(v) for v in value) if isinstance(value, tuple) else value

    args = tuple(convert(a) for a in arguments)
    kwargs = tuple((k, convert(v)) for k, v in keywords.items())
    names = []
    for n, shape in enumerate(outputs):
        names.append(None if shape is None else f"out{n}")
        if shape is not None:
            tensors[f"out{n}"] = Tensor(f"out{n}", tuple(shape), "float32", True)
    return derived(Op("op", target, args, kwargs, tuple(names)), tensors)


def test_linear():
    found = rules("aten.linear.default", [4, 6, 8], [10, 8], [10], outputs=[(4, 6, 10)])
    assert [loop.name for loop in found.loops] == ["n0", "n1", "j", "k"]
    assert found.by_name["j"].inputs == (R, Shard(0), Shard(0)) and found.by_name["j"].outputs == (Shard(2),)
    assert found.by_name["k"].inputs == (Shard(2), Shard(1), P)  # the bias counts once
    assert found.by_name["k"].outputs == (P,)
    assert found.flops == 2 * 4 * 6 * 10 * 8 and found.kind == "matmul"


def test_merged_dims_are_cut_in_equal_pieces_where_the_outer_factor_divides():
    merged = rules("aten.view.default", [4, 6, 8], (24, 8), outputs=[(24, 8)]).by_name
    assert merged["i0"].even and merged["i0"].extent == 4 and merged["i0"].inputs == (Shard(0),)
    assert not merged["i1"].even and merged["i1"].inputs == (Shard(2),)
    assert merged["i0"].allows(4) and not merged["i0"].allows(3)
    apart = rules("aten.view.default", [24, 12], (4, 6, 3, 4), outputs=[(4, 6, 3, 4)]).by_name
    assert apart["i0"].even and apart["i2"].even and "i1" not in apart and "i3" not in apart


def test_uneven_extents_are_first_class():
    found = rules("aten.embedding.default", [50257, 8], ["int64", 4, 6], outputs=[(4, 6, 8)]).by_name
    assert all(found["v"].allows(p) for p in (2, 3, 4))
    assert found["v"].inputs == (Shard(0), R) and found["v"].outputs == (P,)


def test_softmax_exchanges_maximum_and_sum():
    loop = rules("aten.softmax.int", [4, 6, 8], -1, outputs=[(4, 6, 8)]).by_name["i2"]
    assert [(e.reduce, e.loops, e.backward) for e in loop.exchanges] == [
        ("max", ("i0", "i1"), 0),
        ("sum", ("i0", "i1"), 1),
    ]
    assert loop.inputs == (Shard(2),) and loop.outputs == (Shard(2),)


def test_cross_entropy_over_classes_and_batch():
    found = rules("aten.cross_entropy_loss.default", [24, 97], ["int64", 24], outputs=[()]).by_name
    assert found["c"].outputs == (P,) and [e.reduce for e in found["c"].exchanges] == ["max", "sum"]
    assert found["n0"].inputs == (Shard(0), Shard(0)) and [e.loops for e in found["n0"].exchanges] == [()]


def test_convolution_halos_and_groups():
    found = rules(
        "aten.conv2d.default",
        [8, 16, 32, 32],
        [32, 8, 3, 3],
        [32],
        (1, 1),
        (1, 1),
        (1, 1),
        2,
        outputs=[(8, 32, 32, 32)],
    )
    assert found.by_name["y0"].inputs[0] == Window(2, 1, -1, 1)
    assert found.by_name["o"].extent == 2 and found.by_name["o"].inputs == (Shard(1), Shard(0), Shard(0))
    assert "c" not in found.by_name  # channels of a grouped convolution cannot be summed apart
    whole = rules(
        "aten.conv2d.default", [8, 3, 224, 224], [64, 3, 7, 7], None, (2, 2), (3, 3), outputs=[(8, 64, 112, 112)]
    )
    assert whole.by_name["y1"].inputs[0] == Window(3, 2, -3, 3)
    assert whole.by_name["c"].outputs == (P,)
    depthwise = rules(
        "aten.conv2d.default", [8, 16, 8, 8], [16, 1, 3, 3], None, (1, 1), (1, 1), (1, 1), 16, outputs=[(8, 16, 8, 8)]
    )
    assert depthwise.by_name["o"].extent == 16 and depthwise.by_name["o"].inputs == (Shard(1), Shard(0))


def test_attention_heads_groups_and_queries_but_not_keys():
    found = rules(
        "aten.scaled_dot_product_attention.default",
        [2, 8, 16, 4], [2, 2, 16, 4], [2, 2, 16, 4],
        outputs=[(2, 8, 16, 4)], is_causal=True, enable_gqa=True,
    )  # fmt: skip
    assert [loop.name for loop in found.loops] == ["b", "h", "i"]
    assert found.by_name["h"].extent == 2 and found.by_name["h"].even
    assert found.by_name["i"].inputs == (Shard(2), R, R)


def test_batch_norm_statistics_stay_exact():
    shapes = [(8, 16, 4, 4), None, None, (16,), (16,)]
    loop = rules(
        "aten._native_batch_norm_legit_functional.default",
        [8, 16, 4, 4],
        [16],
        [16],
        [16],
        [16],
        True,
        0.1,
        1e-5,
        outputs=shapes,
    ).by_name["i0"]
    assert loop.outputs == (Shard(0), R, R, R, R) and [e.reduce for e in loop.exchanges] == ["sum", "sum"]


def test_sums_pass_through_linear_operators_only():
    assert rules("aten.add.Tensor", [4, 8], [8], outputs=[(4, 8)]).by_name["+"].inputs == (P, P)
    product = rules("aten.mul.Tensor", [4, 8], [8], outputs=[(4, 8)]).by_name
    assert product["+"].inputs == (P, R) and product["+other"].inputs == (R, P)
    assert "+" not in rules("aten.relu.default", [4, 8], outputs=[(4, 8)]).by_name
    assert "+" not in rules("aten.add.Tensor", [4, 8], 1.0, outputs=[(4, 8)]).by_name
    assert rules("aten.transpose.int", [4, 8], 0, 1, outputs=[(8, 4)]).by_name["+"].outputs == (P,)
    assert rules("aten.div.Tensor", [4, 8], [8], outputs=[(4, 8)]).by_name["+"].inputs == (P, R)
    assert "+" not in rules("aten.linear.default", [4, 8], [6, 8], outputs=[(4, 6)]).by_name  # it would cost p times


def test_a_narrowing_cast_is_not_linear():
    from shardwright.graph import Atom

    assert "+" in rules("aten.to.dtype", ["float16", 4, 8], Atom("dtype", "float32"), outputs=[(4, 8)]).by_name
    assert "+" not in rules("aten.to.dtype", [4, 8], Atom("dtype", "float16"), outputs=[(4, 8)]).by_name


def test_maxima_with_gradients_share_among_ties():
    trained = rules("aten.amax.default", [4, 8], (1,), outputs=[(4,)]).by_name["k0"]
    assert trained.outputs == (P,) and [e.reduce for e in trained.exchanges] == ["max", "sum"]
    frozen = rules("aten.amax.default", [4, 8], (1,), outputs=[(4,)], grad=False).by_name["k0"]
    assert frozen.outputs == (Partial("max"),) and not frozen.exchanges


def test_loops_of_one_point_are_not_offered_and_broadcast_inputs_stay_whole():
    found = rules("aten.mul.Tensor", [4, 1, 8], [6, 1], outputs=[(4, 6, 8)]).by_name
    assert found["i1"].inputs == (R, Shard(0)) and found["i0"].inputs == (Shard(0), R)
    assert [loop.name for loop in rules("aten.relu.default", [1, 8], outputs=[(1, 8)]).loops] == ["i1"]


def test_expand_and_creation_are_told_their_size():
    found = rules("aten.expand.default", [1, 8], (4, 8), outputs=[(4, 8)]).by_name
    assert found["i0"].inputs == (R,) and found["i0"].outputs == (Shard(0),)
    assert [loop.name for loop in rules("aten.arange.default", 12, outputs=[(12,)]).loops] == ["i"]


def test_lstm_over_batch_and_hidden_units():
    weights = ([48, 24], [48, 12], [48], [48])
    found = rules(
        "aten.lstm.input",
        [12, 3, 24],
        ([1, 12, 12], [1, 12, 12]),
        weights,
        True,
        1,
        0.0,
        True,
        False,
        True,
        outputs=[(12, 3, 12), (1, 12, 12), (1, 12, 12)],
    )
    assert [loop.name for loop in found.loops] == ["b", "k"]
    assert found.by_name["k"].inputs[4] == Shard(1)
    (exchange,) = found.by_name["k"].exchanges
    assert exchange.points == 3 * 48 and exchange.loops == ("b",)


@pytest.mark.parametrize("unused", [None, (4, 2, 8)])
def test_unused_outputs_do_not_matter(unused):
    found = rules("aten.split.Tensor", [4, 6, 8], 2, 1, outputs=[(4, 2, 8), unused, (4, 2, 8)])
    assert [loop.name for loop in found.loops if loop.divides] == ["i0", "i2"]


def test_equal_operators_are_analysed_once():
    forget()
    tensors = {n: Tensor(n, (4, 8), "float32") for n in ("x", "y", "z")}
    first = Op("a", "aten.relu.default", (Ref("x"),), (), ("y",))
    second = Op("b", "aten.relu.default", (Ref("y"),), (), ("z",))
    assert analyse(first, tensors) is analyse(second, tensors)


@pytest.mark.parametrize(("target", "joined"), [("aten.stack.default", (4, 600)), ("aten.cat.default", (2400,))])
def test_as_many_tensors_are_joined_as_a_recurrent_model_has_steps(target, joined):
    found = rules(target, tuple([4] for _ in range(600)), -1, outputs=[joined]).by_name  # SLANet's decoder
    assert found["+"].inputs == (P,) * 600 and found["+"].outputs == (P,)
    if len(joined) == 2:
        assert found["i0"].inputs == (Shard(0),) * 600 and found["i0"].outputs == (Shard(0),)


def test_tensors_of_nothing_are_described_too():
    for target in ("aten.mul.Tensor", "aten.add.Tensor"):  # DAC's losses of no codebook
        found = rules(target, [0, 4], [0, 4], outputs=[(0, 4)]).by_name
        assert found["i1"].inputs == (Shard(1), Shard(1))
    assert "n1" in rules("aten.linear.default", [0, 6, 8], [10, 8], [10], outputs=[(0, 6, 10)]).by_name
