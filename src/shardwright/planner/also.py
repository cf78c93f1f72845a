"""Calls that are known beforehand to come beside the planned one: captured, checked and priced while planning.

A plan is made for one call; others run under the same strategy (:mod:`shardwright.plans.transfer`), captured when they
first come. Those named here are captured now: each is carried over, its program is built, priced and held against the
memory of a device, and its graph goes into the plan, so that the job finds out early what does not fit and notices where the
model has been edited since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.plans.transfer import carried
from shardwright.simulator import simulate
from shardwright.units import bytes_text, seconds_text


class Call(NamedTuple):
    """Arguments of a call, and in which mode (that of the model, unless said)."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    training: bool | None = None


def captured_calls(model: torch.nn.Module, calls: Sequence[Any]) -> list[Graph]:
    """The graphs of other calls; the model's modes stay as they are."""
    found = []
    for entry in calls:
        if not isinstance(entry, tuple) or not 1 <= len(entry) <= 3 or not isinstance(entry[0], tuple):
            raise ShardwrightError(
                f"also holds {type(entry).__name__} {str(entry)[:60]!r}, which is no call.",
                "Give tuples (args, kwargs) or (args, kwargs, training), such as ((), {'input_ids': x}, False).",
            )
        call = Call(*entry)
        with _in_mode(model, call.training):
            found.append(capture(model, call.args, call.kwargs))
    return found


@contextmanager
def _in_mode(model: torch.nn.Module, training: bool | None) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    if training is not None and training != model.training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def with_calls(plan: Plan, graphs: Sequence[Graph], limit: float | None = None) -> Plan:
    """The plan with these calls prepared; one that does not fit into ``limit`` bytes (the device's otherwise) is refused."""
    if graphs and not plan.whole:
        raise ShardwrightError("Other calls than the planned one cannot be prepared for a pipeline.", "Leave out also.")
    allowed = plan.meshes[0].device.usable_memory if limit is None else limit
    notes = []
    for graph in graphs:
        strategy = carried(plan.graph(trusted=True), plan.stages[0].strategy, graph)
        decisions = replace(plan.stages[0].decisions, otherwise=PricedDecisions(plan.meshes[0]))
        timeline = simulate(graph, strategy, plan.meshes[0], graph.training, plan.optimizer, decisions=decisions)
        peak, name = timeline.peak_bytes, _described(graph)
        if peak > allowed:
            raise Infeasible(
                f"The call with {name} needs {bytes_text(peak)} under this plan, and there are {bytes_text(allowed)}.",
                "Give it fewer rows or shorter sequences, or plan for that call.",
            )
        notes.append(f"also {name}: {seconds_text(timeline.seconds)}, {bytes_text(peak)} a device")
    return replace(plan, also=tuple(graphs), notes=(*plan.notes, *notes))


def _described(graph: Graph) -> str:
    shapes = [(i.path, graph.tensors[i.tensor].shape) for i in graph.inputs if i.tensor is not None]
    text = ", ".join(f"{path.split('[')[-1].strip(']').strip(chr(39))} {list(shape)}" for path, shape in shapes)
    return text + ("" if graph.training else " in evaluation")
