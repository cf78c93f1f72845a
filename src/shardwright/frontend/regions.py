"""Inlines the regions that export wraps into submodules: ``set_grad_enabled`` and harmless ``autocast`` blocks.

Operators from a no-grad region are marked, and what leaves the region is detached, so that gradients stop where they
stop in the model. An autocast region that changes dtypes is refused: inlining it would change the numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardwright.errors import CaptureError

NO_GRAD = "shardwright_no_grad"
"""Key in a node's meta: the operator ran under ``torch.no_grad``."""


def inline_regions(module: GraphModule) -> None:
    """Replace every region call in ``module`` by the nodes of its body, innermost last."""
    while calls := [n for n in module.graph.nodes if n.op == "call_function" and _region(n) is not None]:
        for call in calls:
            _inline(module, call)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or _keeps_statistics(node))


def _keeps_statistics(node: Node) -> bool:
    """Whether it is a batch norm that writes its running statistics, as its schema does not say."""
    return node.target is torch.ops.aten.batch_norm.default and bool(node.args[5]) and isinstance(node.args[3], Node)


def _region(node: Node) -> str | None:
    name = getattr(node.target, "__name__", str(node.target))
    return name if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast") else None


def _inline(module: GraphModule, call: Node) -> None:
    args = list(call.args)
    no_grad = bool(call.meta.get(NO_GRAD, False))
    if _region(call) == "wrap_with_set_grad_enabled":
        enabled, body, operands = args[0], args[1], args[2:]
        no_grad = not enabled
    else:
        device, dtype, enabled, _cache, body, *operands = args
        if enabled:
            raise CaptureError(
                f"The model enters torch.autocast({device!r}, {dtype}) inside its forward.",
                "Build the model in the dtype you want (model.to(torch.bfloat16)) and remove the inner autocast.",
            )
    assert isinstance(body, Node)
    submodule = getattr(module, str(body.target))
    mapping: dict[Node, Any] = {}
    operand = iter(operands)
    results: tuple[Any, ...] = ()
    with module.graph.inserting_before(call):
        for node in submodule.graph.nodes:
            if node.op == "placeholder":
                mapping[node] = next(operand)
            elif node.op == "get_attr":
                name = f"{body.target}_{node.target}"
                setattr(module, name, getattr(submodule, node.target))
                mapping[node] = module.graph.get_attr(name)
                mapping[node].meta = dict(node.meta)
            elif node.op == "output":
                out = node.args[0] if isinstance(node.args[0], tuple | list) else node.args[:1]
                results = tuple(torch.fx.map_arg(o, lambda n: mapping[n]) for o in out)
            else:
                copy = module.graph.node_copy(node, lambda n: mapping[n])
                copy.meta[NO_GRAD] = no_grad
                mapping[node] = copy
        if no_grad:
            results = tuple(_detached(module, r) for r in results)
    for user in list(call.users):  # every user is a getitem: regions return tuples
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index] # a getitem's index is an int
        module.graph.erase_node(user)
    module.graph.erase_node(call)


def _detached(module: GraphModule, value: Any) -> Any:
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    node = module.graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta = {**value.meta, NO_GRAD: True}
    return node
