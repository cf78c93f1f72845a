"""What a converted graph keeps: live operators, canonical names, and gradients where they really flow.

Names count operators per kind after dead code is gone (``linear``, ``linear_1``, …), so the same model captured on
meta and on a real device, where PyTorch traces some helpers differently, has the same names and the same fingerprint.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from shardwright.frontend.gradients import wanted_gradients
from shardwright.graph import Constant, Graph, Op, Ref, Tensor, Value, refs

ASSUMED = "shardwright.assumed.default"
"""Kept though nobody reads its result: it checks what the graph takes for granted (:mod:`~.assumptions`)."""


def pruned(graph: Graph) -> Graph:
    """``graph`` without dead code and unused constants, renamed, with ``grad`` only where a gradient can come back."""
    ops = _live(graph)
    used = {name for op in ops for name in op.inputs} | _results(graph)
    constants = tuple(c for c in graph.constants if c.tensor in used)
    grads = wanted_gradients(graph, ops, {name: tensor.grad for name, tensor in graph.tensors.items()})
    names = _canonical(ops, graph.sources)
    # By old names: a dead tensor may be called what a live one is called from now on.
    kept = {name for op in ops for name in (*op.inputs, *op.outputs) if name is not None}
    kept |= _results(graph) | set(_held(graph, constants))
    tensors = {
        names.get(name, name): dataclasses.replace(tensor, name=names.get(name, name), grad=name in grads)
        for name, tensor in graph.tensors.items()
        if name in kept
    }
    return dataclasses.replace(
        graph,
        tensors=tensors,
        ops=tuple(_renamed(op, names, graph.tensors, grads) for op in ops),
        outputs=tuple(_value(value, names) for value in graph.outputs),
        constants=constants,
        mutations=tuple((held, names.get(fresh, fresh)) for held, fresh in graph.mutations),
    )


def _results(graph: Graph) -> set[str]:
    return {ref.name for ref in refs(graph.outputs)} | {fresh for _, fresh in graph.mutations}


def _held(graph: Graph, constants: tuple[Constant, ...]) -> list[str]:
    held = [p.tensor for p in graph.parameters] + [b.tensor for b in graph.buffers] + [c.tensor for c in constants]
    return held + [i.tensor for i in graph.inputs if i.tensor is not None]


def assumptions(graph: Graph) -> list[Op]:
    """The operators that check, in every step, what the model decided on when it was captured."""
    return [op for op in graph.ops if op.target == ASSUMED]


def _live(graph: Graph) -> list[Op]:
    live = _results(graph)
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if op.target == ASSUMED:
            kept.append(op)
            live.update(op.inputs)
        elif any(out in live for out in op.outputs):
            kept.append(dataclasses.replace(op, outputs=tuple(o if o in live else None for o in op.outputs)))
            live.update(op.inputs)
    kept.reverse()
    return kept


def _canonical(ops: list[Op], taken: tuple[str, ...]) -> dict[str, str]:
    """Old tensor name → new; an operator is named like its (first) result."""
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    reserved = set(taken)
    for op in ops:
        kind = op.target.split(".")[1]
        fresh = kind if not counts[kind] else f"{kind}_{counts[kind]}"
        while fresh in reserved:
            counts[kind] += 1
            fresh = f"{kind}_{counts[kind]}"
        counts[kind] += 1
        reserved.add(fresh)
        names[f"op {op.name}"] = fresh
        for index, out in enumerate(op.outputs):
            if out is not None:
                names[out] = f"{fresh}.{index}" if len(op.outputs) > 1 or "." in out else fresh
    return names


def _renamed(op: Op, names: dict[str, str], tensors: Mapping[str, Tensor], grads: set[str]) -> Op:
    # An operator on the way of no gradient keeps nothing for the backward pass, like one under torch.no_grad.
    depends = any(tensors[name].grad for name in op.inputs)
    idle = depends and not any(out in grads for out in op.outputs)
    return dataclasses.replace(
        op,
        name=names[f"op {op.name}"],
        args=tuple(_value(value, names) for value in op.args),
        kwargs=tuple((key, _value(value, names)) for key, value in op.kwargs),
        outputs=tuple(None if out is None else names[out] for out in op.outputs),
        grad=op.grad and not idle,
    )


def _value(value: Value, names: dict[str, str]) -> Value:
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    return tuple(_value(item, names) for item in value) if isinstance(value, tuple) else value
