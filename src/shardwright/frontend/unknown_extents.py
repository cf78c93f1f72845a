"""Shapes that depend on data: the operators in between become one operator with fixed shapes on its outside.

``x[mask]`` has as many rows as the mask has ones, so nothing can be planned about it. But models come back from there: rows
are summed, scattered to where they came from, averaged to a loss. Here every group of operators that make or read such
tensors (or numbers read from data) is closed under what lies between its members and kept as one operator,
``shardwright.unknown_extents``. It is never cut: every rank computes it whole, alike. Its backward computes the group again
and asks autograd. A tensor of unknown extent that leaves the model is refused.
"""

from __future__ import annotations

import heapq
import itertools
import json
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from shardwright._torch_compat import draws_random_numbers, is_operator
from shardwright.errors import CaptureError
from shardwright.frontend.custom_functions import differentiated_again
from shardwright.frontend.group_text import FUNCTIONS, function_named
from shardwright.frontend.provenance import module_of, source_of
from shardwright.frontend.regions import NO_GRAD

NAME = "shardwright::unknown_extents"
ENCLOSED = "shardwright.unknown_extents.default"


class UnknownResultError(CaptureError):
    """The model returns what no graph can: maybe it can once the example's decisions are assumed."""


def enclose_unknown_extents(program: ExportedProgram) -> None:
    """Replace every group of operators around unknown extents in ``program`` by one call."""
    graph = program.graph
    nodes = list(graph.nodes)
    unknown = {node for node in nodes if node.op == "call_function" and _unknown(node.meta.get("val"))}
    if not unknown:
        return
    (output,) = [node for node in nodes if node.op == "output"]
    for node in output.all_input_nodes:
        if node in unknown:
            raise UnknownResultError(
                f"The model returns a tensor whose shape depends on data: {_target(node)} at {source_of(node)} "
                f"(module {module_of(node)!r}).",
                "Return the whole tensor and the mask or the indices, and select outside of the model.",
            )
    groups = _groups(nodes, unknown)
    calls = [_enclosed(graph, group, nodes) for group in groups]
    _reorder(graph, nodes, groups, calls)
    for group in groups:
        for node in reversed(group):
            graph.erase_node(node)


def _unknown(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not all(isinstance(extent, int) for extent in value.shape)
    if isinstance(value, tuple | list):
        return any(_unknown(item) for item in value)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _groups(nodes: list[Node], unknown: set[Node]) -> list[list[Node]]:
    """Connected operators around unknown values, with everything on a way from one of them to another, in order."""
    place = {node: index for index, node in enumerate(nodes)}
    group_of: dict[Node, set[Node]] = {node: {node} for node in unknown}

    def join(one: Node, other: Node) -> None:
        first, second = group_of.setdefault(one, {one}), group_of.setdefault(other, {other})
        if first is not second:
            small, large = sorted((first, second), key=len)
            large |= small
            for node in small:
                group_of[node] = large

    for node in unknown:
        for user in node.users:
            join(node, user)
    for node in list(group_of):  # a list of results stays with what takes it apart
        for user in node.users:
            if user.target is operator.getitem:
                join(node, user)
    changed = True
    while changed:
        changed = False
        for group in {id(group): group for group in group_of.values()}.values():
            first, last = min(map(place.__getitem__, group)), max(map(place.__getitem__, group))
            after, before = set(group), set(group)
            for node in nodes[first : last + 1]:
                if not after.isdisjoint(node.all_input_nodes):
                    after.add(node)
            for node in reversed(nodes[first : last + 1]):
                if not before.isdisjoint(node.users):
                    before.add(node)
            between = (after & before) - group
            if between:
                member = next(iter(group))
                for node in between:
                    join(member, node)
                changed = True
                break
    distinct = {id(group): group for group in group_of.values()}.values()
    return sorted((sorted(group, key=place.__getitem__) for group in distinct), key=lambda group: place[group[0]])


def _enclosed(graph: torch.fx.Graph, group: list[Node], nodes: list[Node]) -> Node:
    members = set(group)
    for node in group:
        if draws_random_numbers(node.target) and not _idle_dropout(node):
            raise CaptureError(
                f"The model draws random numbers in a shape that depends on data: {_target(node)} at {source_of(node)}.",
                "Set that dropout to 0, or draw for the whole tensor before rows are selected.",
            )
    inputs = list(dict.fromkeys(n for node in group for n in node.all_input_nodes if n not in members))
    results = [node for node in group if any(user not in members for user in node.users)]
    values = [node.meta["val"] for node in results]
    names: dict[Node, Any] = {node: {"input": index} for index, node in enumerate(inputs)}
    names |= {node: {"ref": node.name} for node in group}
    body = {
        "nodes": [
            [
                node.name,
                _target(node),
                _written(node.args, names, node),
                {key: _written(value, names, node) for key, value in node.kwargs.items()},
                not node.meta.get(NO_GRAD, False),
            ]
            for node in group
        ],
        "results": [
            [node.name, str(v.dtype).removeprefix("torch."), list(v.shape)]
            for node, v in zip(results, values, strict=True)
        ],
    }
    with graph.inserting_after(group[-1]):
        call = graph.call_function(torch.ops.shardwright.unknown_extents.default, (json.dumps(body), inputs))
    call.meta = {**group[0].meta, "val": values, NO_GRAD: all(node.meta.get(NO_GRAD, False) for node in group)}
    anchor = call
    for index, node in enumerate(results):
        with graph.inserting_after(anchor):
            anchor = graph.call_function(operator.getitem, (call, index))
        anchor.meta = {**node.meta}
        node.replace_all_uses_with(anchor, delete_user_cb=lambda user: user not in members)
    return call


def _idle_dropout(node: Node) -> bool:
    """An attention or a dropout that drops nothing."""
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | dict(node.kwargs)  # type: ignore[union-attr]  # operators have a schema
    rates = [value for name, value in given.items() if name in ("p", "dropout_p", "dropout")]
    return rates == [0.0] or given.get("train") is False or ("dropout_p" not in given and "attention" in _target(node))


def _reorder(graph: torch.fx.Graph, nodes: list[Node], groups: list[list[Node]], calls: list[Node]) -> None:
    """Keep the order, but let what reads a group's results come after its call."""
    place: dict[Node, float] = {node: float(index) for index, node in enumerate(nodes)}
    for group, call in zip(groups, calls, strict=True):
        place[call] = place[group[-1]] + 0.25
        for user in call.users:
            place[user] = place[group[-1]] + 0.5
    gone = {node for group in groups for node in group}
    kept = [node for node in place if node not in gone]
    missing = {node: sum(1 for n in node.all_input_nodes if n not in gone) for node in kept}
    ready = [(place[node], index) for index, node in enumerate(kept) if not missing[node]]
    heapq.heapify(ready)
    number = {node: index for index, node in enumerate(kept)}
    order: list[Node] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(kept[index])
        for user in kept[index].users:
            if user in missing:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (place[user], number[user]))
    for one, other in itertools.pairwise(order):
        one.append(other)


def _target(node: Node) -> str:
    if is_operator(node.target):
        return str(node.target)
    home = getattr(node.target, "__module__", "")
    name = getattr(node.target, "__name__", str(node.target))
    home = {"_operator": "operator"}.get(home, home)
    if name in FUNCTIONS.get(home, ()):
        return f"{home}:{name}"
    raise CaptureError(
        f"The model calls {name} at {source_of(node)}, which is not an operator.",
        "Higher-order operators cannot be split; rewrite that part with tensors.",
    )


def _written(value: Any, names: dict[Node, Any], node: Node) -> Any:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, tuple | list):
        return [_written(item, names, node) for item in value]
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "any"}
    if isinstance(value, float) and value not in (float("inf"), float("-inf")) and value == value:
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | str):
        return value
    raise CaptureError(
        f"An argument of {_target(node)} at {source_of(node)} is a {type(value).__name__} that depends on data.",
        "Use an operator with a fixed output shape (masking instead of boolean indexing or nonzero).",
    )


def _performed(body: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run the group's operators on whole tensors."""
    document = json.loads(body)
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    held: dict[str, Any] = {}

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return [read(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind == "ref":
            return held[inner]
        if kind == "input":
            return tensors[inner]
        if kind == "torch":
            return getattr(torch, inner)
        return device if kind == "device" else float(inner)

    for name, target, args, kwargs, grad in document["nodes"]:
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            held[name] = function_named(target)(*read(args), **{key: read(value) for key, value in kwargs.items()})
    return [held[name] for name, _, _ in document["results"]]


@torch.library.custom_op(NAME, mutates_args=())
def _operator(body: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [result.clone() for result in _performed(body, tensors)]  # an operator may not return its own input


@_operator.register_fake
def _(body: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    return [
        torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for _, dtype, shape in json.loads(body)["results"]
    ]


differentiated_again(_operator, _performed)
