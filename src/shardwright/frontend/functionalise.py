"""Makes in-place operators functional, on purpose and visibly.

Most in-place code in real models is of one kind: ``x.add_(y)`` on a tensor nobody else sees through a view. There the
twin without underscore is substituted and later readers are pointed at its result. Training batch norm becomes its
functional form that returns the new statistics. Whatever is left (writing into a view) is handed to PyTorch's own
functionalisation, ``run_decompositions({})``, which is slower but general.
"""

from __future__ import annotations

import operator

import torch
from torch.export import ExportedProgram
from torch.fx import Node

MUTATED = "shardwright_mutated"
"""Key in a placeholder's meta: the node that holds its value after the call."""

_BATCH_NORM_FUNCTIONAL = torch.ops.aten._native_batch_norm_legit_functional.default


def functionalise(program: ExportedProgram) -> ExportedProgram:
    """A program without in-place operators, equal in every result."""
    writes = [n for n in program.graph.nodes if n.op == "call_function" and _written(n)]
    if any(_shared(program, node) or _twin(node) is None for node in writes):
        return program.run_decompositions({})
    for node in writes:
        _substitute(program, node)
    for node in list(program.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.batch_norm.default and node.args[5]:
            _functional_batch_norm(program, node)
    return program


def _written(node: Node) -> list[Node]:
    """The arguments this operator writes into."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    positional = list(node.args) + [node.kwargs.get(a.name) for a in schema.arguments[len(node.args) :]]
    return [
        value
        for argument, value in zip(schema.arguments, positional, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node)
    ]


def _twin(node: Node) -> torch._ops.OpOverload | None:
    """``aten.add_.Tensor`` → ``aten.add.Tensor``, where that exists and one argument is written."""
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr] # _written has checked for a schema
    if not name.endswith("_") or len(_written(node)) != 1:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, node.target._overloadname, None)  # type: ignore[union-attr]


def _views(node: Node) -> set[Node]:
    """Every node that may share memory with ``node``: through views of it, or because it is a view itself."""
    group, frontier = {node}, [node]
    while frontier:
        current = frontier.pop()
        neighbours = [u for u in current.users if current in _aliased(u)] + list(_aliased(current))
        for other in neighbours:
            if other not in group:
                group.add(other)
                frontier.append(other)
    return group


def _aliased(node: Node) -> list[Node]:
    """The inputs whose memory the result of ``node`` may share."""
    if node.op != "call_function":
        return []
    if not hasattr(node.target, "_schema"):  # operator.getitem of a view such as split
        return [a for a in node.args if isinstance(a, Node)]
    schema = node.target._schema
    returned = {tag for r in schema.returns if r.alias_info is not None for tag in r.alias_info.before_set}
    return [
        value
        for argument, value in zip(schema.arguments, node.args, strict=False)
        if argument.alias_info is not None
        and returned & set(argument.alias_info.before_set)
        and isinstance(value, Node)
    ]


def _shared(program: ExportedProgram, node: Node) -> bool:
    """Whether a view of what ``node`` writes is read afterwards."""
    (target,) = _written(node) if len(_written(node)) == 1 else (None,)
    if target is None:
        return True
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    others = {n for n in _views(target) if n is not target and n is not node and not _written(n)}
    chain = {n for n in _views(target) if _written(n)}  # earlier in-place versions of the same tensor
    return any(order[user] > order[node] for n in others for user in n.users if n not in chain)


def _substitute(program: ExportedProgram, node: Node) -> None:
    twin = _twin(node)
    (target,) = _written(node)
    with program.graph.inserting_before(node):
        fresh = program.graph.call_function(twin, node.args, dict(node.kwargs))
    fresh.meta = dict(node.meta)
    fresh.meta.setdefault("val", target.meta.get("val"))
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    node.replace_all_uses_with(fresh)
    target.replace_all_uses_with(fresh, delete_user_cb=lambda user: user is not fresh and order[user] > order[fresh])
    program.graph.erase_node(node)
    origin = target.meta.get("shardwright_origin", target)
    fresh.meta["shardwright_origin"] = origin
    if origin.op == "placeholder":
        origin.meta[MUTATED] = fresh


def _functional_batch_norm(program: ExportedProgram, node: Node) -> None:
    x, weight, bias, mean, variance, _training, momentum, epsilon, *_ = node.args
    if mean is None or variance is None:
        return
    graph = program.graph
    with graph.inserting_before(node):
        whole = graph.call_function(_BATCH_NORM_FUNCTIONAL, (x, weight, bias, mean, variance, True, momentum, epsilon))
        results = [graph.call_function(operator.getitem, (whole, i)) for i in (0, 3, 4)]
    values = [node.meta["val"], mean.meta["val"], variance.meta["val"]]  # type: ignore[union-attr] # both are nodes
    whole.meta = {**node.meta, "val": (values[0], values[1], values[1], values[1], values[2])}
    for result, value in zip(results, values, strict=True):
        result.meta = {**node.meta, "val": value}
    node.replace_all_uses_with(results[0])
    graph.erase_node(node)
    mean.meta[MUTATED], variance.meta[MUTATED] = results[1], results[2]  # type: ignore[union-attr]
