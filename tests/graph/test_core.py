"""A graph that exists is well formed, and goes to JSON and back without loss."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import GraphError
from shardwright.graph import (
    Atom,
    Buffer,
    Constant,
    Graph,
    Input,
    Op,
    Parameter,
    Ref,
    Tensor,
    Value,
    fingerprint,
    from_json,
    to_json,
)

X, Y = Tensor("x", (4, 8), "float32"), Tensor("y", (4, 8), "float32", grad=True)
RELU = Op("relu", "aten.relu.default", (Ref("x"),), (), ("y",), module="net", source="net.py:3")


def simple(op: Op = RELU, **changes: object) -> Graph:
    return dataclasses.replace(Graph({"x": X, "y": Y}, (op,), inputs=(Input("x"),), outputs=(Ref("y"),)), **changes)


def test_a_graph_knows_who_makes_and_who_reads() -> None:
    graph = simple()
    assert graph.producer["y"] is graph.ops[0]
    assert [op.name for op in graph.consumers["x"]] == ["relu"]
    assert graph.sources == ("x",)
    assert X.bytes == 128


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (dataclasses.replace(RELU, args=(Ref("nobody"),)), "uses tensor 'nobody' before it is defined"),
        (dataclasses.replace(RELU, outputs=("x",)), "defined twice"),
        (dataclasses.replace(RELU, outputs=("z",)), "not declared"),
    ],
)
def test_malformed_graphs_cannot_be_built(op: Op, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simple(op)


numbers = st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.booleans()
leaves = numbers | st.none() | st.text(max_size=8) | st.just(Atom("dtype", "bfloat16")) | st.just(Ref("x"))
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A chain of operators with arbitrary arguments, some with a result nobody uses."""
    tensors = {
        "x": X,
        "w": Tensor("w", (8,), "bfloat16", True),
        "b": Tensor("b", (), "int64"),
        "c": Tensor("c", (2,), "int8"),
    }
    ops, last = [], "x"
    for index in range(draw(st.integers(1, 4))):
        name = f"t{index}"
        tensors[name] = Tensor(
            name, tuple(draw(st.lists(st.integers(0, 9), max_size=3))), "float16", draw(st.booleans())
        )
        args = (Ref(last), *draw(st.lists(values, max_size=3)))
        kwargs = tuple(draw(st.dictionaries(st.sampled_from(["dim", "scale", "other"]), values, max_size=2)).items())
        ops.append(Op(f"op{index}", "aten.some.thing", args, kwargs, (name, None), "m", "f.py:1", draw(st.booleans())))
        last = name
    return Graph(
        tensors,
        tuple(ops),
        inputs=(Input("x", None, "[0]"), Input(None, draw(values.filter(lambda v: not _has_ref(v))), "['flag']")),
        outputs=(Ref(last), draw(numbers)),
        parameters=(Parameter("w", ("a.w", "b.w"), draw(st.booleans())),),
        buffers=(Buffer("b", "count", draw(st.booleans())),),
        constants=(Constant("c", draw(st.binary(min_size=2, max_size=2))),),
        mutations=(("b", last),),
        input_tree="[1]",
        training=draw(st.booleans()),
    )


def _has_ref(value: Value) -> bool:
    return isinstance(value, Ref) or (isinstance(value, tuple) and any(_has_ref(item) for item in value))


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_json_and_back_is_the_same_graph(graph: Graph) -> None:
    text = to_json(graph)
    again = from_json(text)
    assert again == graph
    assert to_json(again) == text
    assert fingerprint(again) == fingerprint(graph)
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_numbers_json_has_no_words_for() -> None:
    graph = simple(dataclasses.replace(RELU, args=(Ref("x"), math.inf, -math.inf, math.nan)))
    args = from_json(to_json(graph)).ops[0].args
    assert args[1:3] == (math.inf, -math.inf)
    assert math.isnan(args[3])  # type: ignore[arg-type]


def test_the_fingerprint_ignores_where_code_lies_and_sees_what_it_does() -> None:
    base = fingerprint(simple())
    assert fingerprint(simple(dataclasses.replace(RELU, source="elsewhere.py:9", module="other"))) == base
    changed = [
        simple(dataclasses.replace(RELU, target="aten.gelu.default")),
        simple(dataclasses.replace(RELU, grad=False)),
        simple(training=False),
        simple(tensors={"x": X, "y": dataclasses.replace(Y, dtype="bfloat16")}),
    ]
    assert len({base, *map(fingerprint, changed)}) == 5


def test_another_format_is_refused() -> None:
    with pytest.raises(GraphError, match="shardwright-graph-1"):
        from_json('{"format": "something else"}')
