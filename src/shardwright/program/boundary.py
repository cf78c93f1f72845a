"""The routes that tensors take over the boundary of a module: inputs to the layout they rest in, results to the whole.

A gradient lies as its tensor does outside of the module, and dually inside (docs/architecture.md), so an input's gradient
goes from the dual of its resting layout to the layout it came in, and a result's from the layout it was handed out in back
to the one it was computed in.
"""

from __future__ import annotations

from typing import Any

from shardwright.errors import LoweringError
from shardwright.operators.rules import Layout, Replicate
from shardwright.program.binding import bind, dual
from shardwright.program.dataflow import Dataflow
from shardwright.program.decisions import Decisions
from shardwright.program.steps import BoundStep

Steps = tuple[BoundStep, ...]


def whole_layout(layout: Any) -> Layout:
    """Everything on every rank."""
    return tuple(Replicate() for _ in layout)


def arriving(flow: Dataflow, decisions: Decisions, tensor: str, outside: Layout) -> tuple[Steps, Steps]:
    """From the layout that an input is given in to the one that the plan keeps it in, and its gradient back."""
    resting = flow.strategy.resting[tensor]
    return _steps(flow, decisions, tensor, outside, resting), _steps(flow, decisions, tensor, dual(resting), outside)


def leaving(flow: Dataflow, decisions: Decisions, value: int) -> tuple[Steps, Steps]:
    """From the layout of a result, with nothing left to be summed, to the whole tensor, and its gradient back."""
    tensor, inside = flow.values[value].tensor, flow.values[value].needs
    whole = whole_layout(inside)
    return _steps(flow, decisions, tensor, inside, whole), _steps(flow, decisions, tensor, whole, inside)


def cross(flow: Dataflow, decisions: Decisions) -> None:
    """Ask for every route over the boundary, so that a plan holds them."""
    for entry in flow.graph.inputs:
        if entry.tensor is not None:
            arriving(flow, decisions, entry.tensor, whole_layout(flow.strategy.resting[entry.tensor]))
    for value in flow.results:
        leaving(flow, decisions, value)


def _steps(flow: Dataflow, decisions: Decisions, tensor: str, source: Any, target: Any) -> Steps:
    meta = flow.graph.tensors[tensor]
    route = decisions.route(meta.shape, meta.dtype, source, target, False) if source != target else None
    if route is None:
        if source != target:
            raise LoweringError(
                f"tensor {tensor!r} {meta.shape} cannot go from {source} to {target}.", "Split otherwise."
            )
        return ()
    return bind(route.forward, source, meta.shape, flow.place)[0]
