"""What graphs in plans may call, and with what: nothing of a file becomes code, and what no operator takes is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.errors import GraphError, PlanError, ShardwrightError
from shardwright.frontend import capture
from shardwright.frontend.group_text import calls_inside, function_named
from shardwright.graph import Atom, Graph, Op, Ref, from_json, to_json
from shardwright.graph.computation import computation
from shardwright.lowering.calls import _filled
from shardwright.plans.packed import pack, unpack


def captured() -> Graph:
    with torch.device("meta"):
        return capture(torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)), (torch.empty(4, 16),))


def with_first(**changes: Any) -> Graph:
    graph = captured()
    return replace(graph, ops=(replace(graph.ops[0], **changes), *graph.ops[1:]))


LINEAR = (Ref("input"), Ref("p_0_weight"), Ref("p_0_bias"))


def test_the_graph_itself_is_let_in() -> None:
    graph = captured()
    assert graph.ops[0].args == LINEAR
    assert unpack(pack(graph) or "") == graph


@pytest.mark.parametrize(
    "changes",
    [
        {"kwargs": (("**{open('ran', 'w'): 1}, bias", 1),)},
        {"args": LINEAR[:2], "kwargs": (("input", Ref("input")),)},
        {"args": LINEAR[:1]},
        {"args": (*LINEAR, 1)},
        {"args": (*LINEAR[:2], "bias")},
        {"args": (*LINEAR[:2], (1, 2))},
        {"outputs": ("linear", None)},
        {"target": "aten.__class__.mro"},
        {"target": "aten.linear.__call__"},
    ],
    ids=["code", "twice", "missing", "too many", "a text", "a list", "results", "no operator", "no overload"],
)
def test_arguments_that_no_operator_takes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"aten\.linear|aten\.__class__"):
        unpack(pack(with_first(**changes)) or "")


@pytest.mark.parametrize(
    ("value", "shown"),
    [({"dtype": "load"}, "load"), ({"hub": "float32"}, "hub"), (10**20, "10000"), ({"layout": "nn"}, "nn")],
)
def test_a_name_is_looked_up_where_it_belongs(value: Any, shown: str) -> None:
    """``getattr(torch, …)`` was asked for whatever a file said."""
    document = json.loads(to_json(captured()))
    document["ops"][0]["args"].append(value)
    with pytest.raises(GraphError, match=shown):
        from_json(json.dumps(document))


def test_sizes_and_constants_are_possible() -> None:
    document = json.loads(to_json(captured()))
    huge = {**document, "tensors": {**document["tensors"], "input": ["float32", [2**40, 2**40], False]}}
    with pytest.raises(GraphError, match="larger than any memory"):
        from_json(json.dumps(huge))
    with pytest.raises(GraphError, match="3 bytes"):
        from_json(json.dumps({**document, "constants": [["input", "AAAA"]], "inputs": []}))


def test_nothing_of_an_operator_becomes_source_text(tmp_path: Path) -> None:
    """Keywords were: ``eval`` ran them, with right numbers and without a word."""
    mark = tmp_path / "ran"
    code = f"**({{}} if open({str(mark)!r}, 'w') else {{}}), bias"
    op = Op("linear", "aten.linear.default", LINEAR[:2], ((code, LINEAR[2]),), ("y",))
    with pytest.raises(Exception, match="open"):  # the operator says that it has no such argument
        _filled(op, torch.device("cpu"))(torch.ones(4, 16), torch.ones(8, 16), torch.ones(8))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "shapes"),
    [
        ("aten.linear.default", LINEAR, (), [(4, 3), (2, 3), (2,)]),
        ("aten.linear.default", LINEAR[:2], (("bias", LINEAR[2]),), [(4, 3), (2, 3), (2,)]),
        ("aten.layer_norm.default", (LINEAR[0], (3,), *LINEAR[1:], 1e-5, False), (), [(4, 3), (3,), (3,)]),
        ("aten.cat.default", (LINEAR[:2], 1), (), [(4, 3), (4, 2)]),
        ("aten.cat.default", (LINEAR[:2],), (("dim", 1),), [(4, 3), (4, 2)]),
        ("aten.rsub.Scalar", (LINEAR[0], 2), (("alpha", 3),), [(4, 3)]),
        ("aten.zeros.default", ((2, 3),), (("dtype", Atom("dtype", "float64")),), []),
    ],
)
def test_arguments_stand_where_they_stood(target: str, args: Any, kwargs: Any, shapes: Any) -> None:
    """Whichever way a call is put together."""
    tensors = [torch.randn(shape) for shape in shapes]
    by_name = {ref.name: tensor for ref, tensor in zip(LINEAR, tensors, strict=False)}

    def value(item: Any) -> Any:
        if isinstance(item, Ref):
            return by_name[item.name]
        if isinstance(item, Atom):
            return getattr(torch, item.value)
        return [value(part) for part in item] if isinstance(item, tuple) else item

    namespace, name, overload = target.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    expected = operator(*map(value, args), **{key: value(item) for key, item in kwargs})
    found = _filled(Op("op", target, args, kwargs, ("y",)), torch.device("cpu"))(*tensors)
    assert torch.equal(found, expected) and found.dtype == expected.dtype


def group(*nodes: Any) -> str:
    return json.dumps({"nodes": nodes, "results": [["n", "float32", [1]]]})


def test_groups_of_operators_hold_operators_and_arithmetic() -> None:
    body = group(
        ["k", "aten.item.default", [{"input": 0}], {}, True],
        ["n", "operator:add", [{"ref": "k"}, 1], {}, True],
    )
    assert calls_inside(body, 1) == [("aten.item.default", (Ref("input 0"),), {})]
    for node in (
        ["n", "operator:methodcaller", ["sum"], {}, True],
        ["n", "operator:attrgetter", ["__class__.__subclasses__"], {}, True],
        ["n", "torch:load", ["/etc/passwd"], {}, True],
        ["n", "os:system", ["true"], {}, True],
        ["n", "operator:add", [{"ref": "nobody"}, 1], {}, True],
        ["n", "operator:add", [{"input": 7}, 1], {}, True],
        ["n", "operator:add"],
    ):
        with pytest.raises(GraphError, match="damaged"):
            calls_inside(group(node), 1)
    with pytest.raises(ShardwrightError, match="shifted"):
        function_named("operator:lshift")(1, 10**12)


def test_an_operator_whose_results_nobody_names_is_computed_too() -> None:
    """A graph that does more than the model was taken for the model's, in another order."""
    graph = captured()
    more = Op("more", "aten.from_file.default", ("made-by-a-plan", True, 8), (), (None,))
    assert computation(replace(graph, ops=(*graph.ops, more))) != computation(graph)
