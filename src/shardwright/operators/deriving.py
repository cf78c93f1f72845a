"""``analyse``: the rules of an operator, derived once for every distinct signature.

The way goes from the best knowledge to the least: a description, the element-wise rule, probing, and at the end no rule
at all, which is always correct: every rank computes the whole operator, and the reason is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import Partial

from shardwright.errors import DescriptionError
from shardwright.graph import Op, Ref, Tensor
from shardwright.operators import elementwise
from shardwright.operators.analysis import Candidate, candidates, every_loop, linear_rules, points
from shardwright.operators.binding import run, symbolic
from shardwright.operators.language import Nest, TensorArgument
from shardwright.operators.own_orders import with_own_order
from shardwright.operators.pieces import croppable
from shardwright.operators.record import OperatorRecord, record
from shardwright.operators.rules import Exchange, LoopRule, OpRules

CHEAP = frozenset({"elementwise", "view", "copy", "reduction"})
"""Kinds that unreduced sums may pass: every rank does the whole operator, which must cost next to nothing."""

FAILED = "its description failed"
_CACHE: dict[Any, OpRules] = {}


def analyse(op: Op, tensors: Mapping[str, Tensor]) -> OpRules:
    """Every way to cut an operator; operators with the same target, arguments and shapes share one answer.

    >>> x, w = Tensor("x", (8, 4), "float32"), Tensor("w", (6, 4), "float32")
    >>> y = Tensor("y", (8, 6), "float32")
    >>> linear = Op("l", "aten.linear.default", (Ref("x"), Ref("w")), (), ("y",))
    >>> [loop.name for loop in analyse(linear, {"x": x, "w": w, "y": y}).loops]
    ['n0', 'j', 'k']
    """
    key = signature(op, tensors)
    rules = _CACHE.get(key)
    if rules is None:
        rules = _CACHE[key] = with_own_order(op, tensors, derived(op, tensors))
    return rules


def forget() -> None:
    """Drop every cached answer, after a description was registered or replaced."""
    _CACHE.clear()


def signature(op: Op, tensors: Mapping[str, Tensor]) -> Any:
    """What an operator's rules depend on."""
    sorts: dict[str, int] = {}

    def ordered(t: Tensor) -> Any:
        if t.order is None:
            return None
        return (sorts.setdefault(t.order.sort, len(sorts)), t.order.what, t.order.each, t.order.units)

    def shape(value: Any) -> Any:
        if isinstance(value, Ref):
            t = tensors[value.name]
            return (t.shape, t.dtype, t.grad, ordered(t))
        if isinstance(value, tuple):
            return tuple(shape(v) for v in value)
        return (type(value), value)

    made = (None if name is None else tensors[name] for name in op.outputs)
    outputs = tuple(None if t is None else (t.shape, t.dtype, ordered(t)) for t in made)
    return (
        op.target,
        shape(op.args),
        shape(tuple(v for _, v in op.kwargs)),
        tuple(k for k, _ in op.kwargs),
        outputs,
        op.grad,
    )


def derived(op: Op, tensors: Mapping[str, Tensor]) -> OpRules:
    """The rules of one operator, without the cache."""
    try:
        _, arguments, inputs = symbolic(op, dict(tensors))
    except AttributeError:
        return OpRules((), "replicated", "other", reason=f"the library that defines {op.target} is not imported")
    shapes = [None if name is None else tensors[name].shape for name in op.outputs]
    known = record(op.target)
    if known.function is not None:
        try:
            nest = run(known.function, arguments, shapes)
        except DescriptionError as error:
            if not op.target.startswith("aten."):
                raise  # the user's own: let them know
            return OpRules((), "replicated", known.kind, reason=f"{FAILED}: {error.message}")
        if nest is not None:
            return _rules(op, tensors, nest, inputs, known, "described", arguments)
        return OpRules((), "replicated", known.kind, reason="its description does not cover these arguments")
    if (simple := elementwise.description(op, inputs, shapes)) is not None:
        assert simple.function is not None
        nest = run(simple.function, arguments, shapes)
        assert nest is not None
        return _rules(op, tensors, nest, inputs, simple, "elementwise", arguments)
    if known.whole or not any(shapes):
        return OpRules((), "replicated", "other", reason=known.whole or "it has no tensor result")
    from shardwright.operators.probing import probe

    return probe(op, tensors)


def _rules(
    op: Op,
    tensors: Mapping[str, Tensor],
    nest: Nest,
    inputs: tuple[TensorArgument, ...],
    known: OperatorRecord,
    origin: str,
    arguments: dict[str, Any],
) -> OpRules:
    results = [tensors[name] for name in op.outputs if name is not None]
    dtype = next((t.dtype for t in results if t.dtype.startswith(("float", "bfloat"))), "float32")
    kernel = record(op.target).piece is not None
    loops = [
        candidate.rule
        for candidate in candidates(nest, inputs, dtype)
        if (kernel or candidate.plain or _runs_on_window(candidate, inputs))
        and _worth_it(candidate, known.kind)
        and _gradients_hold(candidate.rule, op, inputs, results)
    ]
    if known.kind in CHEAP and results and all(t.dtype.startswith(("float", "bfloat", "complex")) for t in results):
        loops += linear_rules(nest, inputs)
    loops = _with_points(loops, nest)
    flops = 0.0
    if known.flops is not None:
        flops = float(known.flops(arguments, shapes_of(op, tensors)))
    elif known.kind in ("matmul", "convolution"):
        flops = 2.0 * points(nest)
    return OpRules(tuple(loops), origin, known.kind, flops)


def _with_points(loops: list[LoopRule], nest: Nest) -> list[LoopRule]:
    """Exchanges name the loops that can be cut; what the other loops and the units of uneven ones add is in ``points``."""
    units = {loop.name: loop.extent for loop in loops if loop.divides}
    extents = {loop.name: loop.extent for loop in every_loop(nest)}

    def finished(exchange: Exchange) -> Exchange:
        points = math.prod(extents[name] // units.get(name, 1) for name in exchange.loops)
        return replace(exchange, loops=tuple(name for name in exchange.loops if name in units), points=points)

    return [
        replace(loop, exchanges=tuple(finished(e) for e in loop.exchanges)) if loop.exchanges else loop
        for loop in loops
    ]


def shapes_of(op: Op, tensors: Mapping[str, Tensor]) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(None if name is None else tensors[name].shape for name in op.outputs)


def _worth_it(candidate: Candidate, kind: str) -> bool:
    """Whether a piece does less than the whole operator: nothing is sliced out, and free loops really are a size."""
    return not candidate.sliced and (not candidate.free or kind in ("view", "creation", "random"))


def _runs_on_window(candidate: Candidate, inputs: tuple[TensorArgument, ...]) -> bool:
    """A window that the operator itself can be run on, without a kernel of its own."""
    alone = not (candidate.positional or candidate.sliced or candidate.free or candidate.rule.exchanges)
    return alone and candidate.rule.windowed and croppable(candidate.rule, [x.shape for x in inputs])


def _gradients_hold(rule: LoopRule, op: Op, inputs: tuple[TensorArgument, ...], results: list[Tensor]) -> bool:
    """An unreduced maximum or product has no local gradient, and booleans are not reduced between ranks."""
    unreduced = [p.reduce_op for p in rule.outputs if isinstance(p, Partial)]
    if not unreduced:
        return True
    if any(kind != "sum" for kind in unreduced) and op.grad and any(t.grad for t in inputs):
        return False
    return not any(t.dtype == "bool" for t in results)
