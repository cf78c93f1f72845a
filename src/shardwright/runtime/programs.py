"""The programs of one parallelized module: one for the planned call, others for calls that differ from it.

A strategy is about operators and loops, not about extents. A call with another batch or length, with arguments more or
fewer, or in the other mode is captured from the model's template when it first comes (on every rank; the ranks compare what
they have and hold it against what the plan knows of such a call), stages and splits are carried over
(:mod:`shardwright.plans.transfer`), and the programs are proved sound, as the planned ones were. The next call of that kind
finds them. Parameters, buffers and process groups belong to the module and are shared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shardwright._torch_compat import flatten_tree, flatten_with_paths
from shardwright.cluster import Device
from shardwright.costs.memory import memory
from shardwright.errors import LoweringError, RunError, ShardwrightError
from shardwright.frontend.containers import GIVEN, register_containers
from shardwright.frontend.gradients import with_input_gradients
from shardwright.garbage import collection_paused
from shardwright.graph import Graph, fingerprint, refs
from shardwright.operators.rules import Layout
from shardwright.plans.other_calls import for_other_call
from shardwright.program.binding import Place
from shardwright.program.dataflow import Dataflow
from shardwright.runtime.agreement import agree, common_graph
from shardwright.runtime.calling import Calling, Form, refuse_other_mode
from shardwright.runtime.execution import Execution
from shardwright.runtime.expected_calls import warn_of_change
from shardwright.runtime.same_rows import SameRows
from shardwright.runtime.stages import Stages
from shardwright.runtime.template import Template
from shardwright.units import bytes_text

LIMIT = 32
"""Programs that a module keeps beside the planned one; the one that was not called for longest makes room for the next."""
_FORMS = 8
_log = logging.getLogger("shardwright")

Modes = tuple[bool, ...]
Watch = Callable[[Graph, Mapping[str, Layout] | None], SameRows]


class Prepared:
    """What one kind of call runs: its graph and its stages, by the gradients that are wanted of it."""

    def __init__(self, watch: Watch, first: Execution) -> None:
        self.graph = first.graph
        self.forms: list[Form] = []
        self.number = 0
        """Which of its module's programs, the planned one first; the same on every rank."""
        self.first, self.rank = first, first.rank
        self.executions: dict[frozenset[str], Execution] = {frozenset(): first} if first.training else {}
        self.same_rows = watch(self.graph, None if first.rank.inputs == "whole" else first.program.strategy.resting)
        self.draws = first.draws
        self.returns_arguments = GIVEN in self.graph.output_tree
        self._frozen = [p.tensor for p in self.graph.parameters if not p.trainable]

    def recognised(self, spec: Any, leaves: list[Any], modes: Modes) -> dict[str, Tensor] | None:
        """The tensors of a call by name, if it is of this kind."""
        for form in self.forms:
            if form.fits(spec, leaves, modes):
                return form.tensors_of(leaves)
        return None

    def learn(self, form: Form) -> None:
        self.forms = [form, *self.forms[: _FORMS - 1]]

    def execution(self, inputs: Mapping[str, Tensor]) -> Execution:
        """The program for these inputs: gradients are wanted of those that require one, and of what was thawed."""
        if not torch.is_grad_enabled():
            return self.executions.get(frozenset(), self.first)
        thawed = (name for name in self._frozen if name in self.rank.home and self.rank.held(name).requires_grad)
        wanted = frozenset([*(name for name, leaf in inputs.items() if leaf.requires_grad), *thawed])
        if wanted not in self.executions:
            self.executions[wanted] = self.first.like(self._differentiated(wanted))
        return self.executions[wanted]

    def _differentiated(self, sources: frozenset[str]) -> Stages:
        """Stages in which gradients flow back to these inputs and parameters too, under the same strategies."""
        graph = with_input_gradients(self.graph, sources) if sources else self.graph
        try:
            stages = self.first.stages.again(graph)
        except LoweringError as error:
            raise RunError(
                f"The plan has no way for the gradient of {', '.join(sorted(sources))}: {error.message}",
                "Detach the input, or split that operator otherwise (shardwright plan --forbid).",
            ) from error
        before = stages.pipeline.micro.prepared
        if before is not None and any(before.tensors[ref.name].grad for ref in refs(before.outputs)):
            raise RunError(
                f"The gradient of {', '.join(sorted(sources))} goes through what is computed of the whole batch before it "
                "is cut into micro-batches, and nothing goes back through that.",
                "Detach the input, or plan with one micro-batch.",
            )
        return stages


@dataclass(frozen=True, eq=False)
class ModuleContext:
    """What all programs of a module have in common. ``homes`` finds a parameter or buffer by its path in the module;
    ``expected`` are the graphs of other calls that the plan was made for."""

    calling: Calling | None
    template: Template | None
    homes: Mapping[str, tuple[dict[str, Any], str]]
    watch: Watch
    judged_on: Device | None
    modules: tuple[tuple[str, torch.nn.Module], ...]
    expected: tuple[Graph, ...] = ()
    new_call: Callable[[], None] | None = None
    """Called before a call of a new kind is captured, so that no rank does so alone."""

    def modes(self) -> Modes:
        return tuple([module.training for _, module in self.modules])


class Programs:
    """Finds the program of a call, or makes it."""

    def __init__(self, planned: Prepared, context: ModuleContext) -> None:
        self.planned, self.context = planned, context
        self._modes = context.modes()
        self._recent = [planned]
        self._known: dict[tuple[Any, ...], Prepared] = {}
        self._current = planned.first
        self._made_so_far = 0

    def __len__(self) -> int:
        return len(self._recent)

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Prepared, dict[str, Tensor]]:
        """What this call runs, and its tensors by the names of that graph."""
        leaves, spec = flatten_tree((args, dict(kwargs)))
        modes = self.context.modes()
        for place, prepared in enumerate(self._recent):
            inputs = prepared.recognised(spec, leaves, modes)
            if inputs is not None:
                if place:
                    self._recent.insert(0, self._recent.pop(place))
                return prepared, inputs
        return self._met_first(args, dict(kwargs), modes)

    def execution(self, prepared: Prepared, inputs: Mapping[str, Tensor]) -> Execution:
        """The execution of a call; the one that ran before lets go of what it keeps between steps."""
        found = prepared.execution(inputs)
        if found is not self._current:
            self._current.retire()
            self._current = found
        return found

    def _met_first(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: Modes
    ) -> tuple[Prepared, dict[str, Tensor]]:
        """A call that is written as none before: it may be of a known kind all the same."""
        register_containers((args, kwargs), given=True)
        calling, planned = self.context.calling, self.planned
        arranged = (args, kwargs) if calling is None else calling.arranged(args, kwargs)
        again = calling is not None and self.context.template is not None and planned.rank.inputs == "whole"
        try:
            inputs = planned.first.matched(*arranged)
            self._check_modes(modes, again)
            prepared = planned
        except RunError as difference:
            if calling is None or not again:
                raise
            prepared = self._other(*calling.plainest(args, kwargs), modes, difference)
            form = Form.of(calling, prepared.graph, args, kwargs, modes)
            inputs = form.tensors_of(flatten_tree((args, kwargs))[0])
        if calling is not None:
            prepared.learn(Form.of(calling, prepared.graph, args, kwargs, modes))
        if prepared not in self._recent:
            self._recent.insert(0, prepared)
        return prepared, inputs

    def _check_modes(self, modes: Modes, again: bool) -> None:
        """Whether this is the mode that was planned; what cannot be captured again may be in the other if it is idle."""
        idle = not self.planned.draws and not self.planned.graph.mutations
        if modes != self._modes and (again or not idle):
            refuse_other_mode(not self.planned.graph.training, self.planned.graph.training)

    def _other(self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: Modes, difference: RunError) -> Prepared:
        key = _key(modes, args, kwargs)
        if key not in self._known:
            started = perf_counter()
            if self.context.new_call is not None:
                self.context.new_call()
            try:
                with collection_paused():  # a capture is much that lives until it is done
                    prepared = self._prepared(args, kwargs, modes)
            except ShardwrightError as error:
                raise RunError(
                    f"{difference.message} It has no program of its own, because: {error.message}", error.remedy
                ) from error
            self._known[key] = prepared
            self._make_room()
            _log.info(
                "A call that differs from the planned one (%s) has a program of its own, made in %.2f s: %d programs now.",
                difference.message.rstrip("."),
                perf_counter() - started,
                len(self._known) + 1,
            )
        return self._known[key]

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: Modes) -> Prepared:
        template = self.context.template
        assert template is not None
        training = {path: mode for (path, _), mode in zip(self.context.modules, modes, strict=True)}
        graph = common_graph(template.captured(args, kwargs, training))
        agree({"call": fingerprint(graph)})
        warn_of_change(self.context.expected, graph, self.context.calling)
        return self._made(graph, backward=torch.is_grad_enabled())

    def _made(self, graph: Graph, backward: bool) -> Prepared:
        known, graph = self.planned.first.stages, _read_only(graph)
        plan = for_other_call(known.plan, known.graph, graph, backward)
        try:
            stages = known.again(graph, plan)
        except LoweringError as error:
            _log.warning("%s That call is computed whole on every rank of a stage.", error.message)
            stages = known.again(graph, for_other_call(known.plan, known.graph, graph, backward, whole=True))
        self._refuse_other_rest(stages)
        self._refuse_too_large(stages)
        homes = self.context.homes
        home = {p.tensor: homes[path] for p in graph.parameters if (path := p.paths[0]) in homes}
        home |= {b.tensor: homes[b.path] for b in graph.buffers if b.path in homes}
        made = Prepared(self.context.watch, self.planned.first.like(stages, home))
        self._made_so_far += 1
        made.number = self._made_so_far
        return made

    def _refuse_other_rest(self, stages: Stages) -> None:
        """Parameters lie as the planned call has them: in the shares of an axis, or in equal parts."""
        known = self.planned.first.stages
        lies = {paths: place for flow in _flows(known) for paths, place in _places(flow)}
        for flow in _flows(stages):
            for paths, place in _places(flow) if flow.strategy.shares else ():
                if place != lies.get(paths):
                    raise RunError(
                        f"This call would have {paths[0]} cut otherwise than it lies, in the shares "
                        f"{dict(flow.strategy.shares)}.",
                        "Give the model calls like the planned one, or plan for this call in equal shares.",
                    )

    def _refuse_too_large(self, stages: Stages) -> None:
        device = self.context.judged_on
        if device is None or not stages.pipeline.reduces_inside:
            return  # several programs share a device
        both = (stages, self.planned.first.stages)
        needed, planned = (max(memory(one, device).needed for one in each.programs.values()) for each in both)
        if needed > max(device.usable_memory, planned):
            raise RunError(
                f"This call needs {bytes_text(needed)} on a device that has {bytes_text(device.usable_memory)} "
                f"(the planned one needs {bytes_text(planned)}).",
                "Give fewer rows or shorter sequences at a time, or plan for this call.",
            )

    def _make_room(self) -> None:
        while len(self._known) > LIMIT:
            last = next(p for p in reversed(self._recent) if p is not self.planned)
            self._recent.remove(last)
            self._known = {key: prepared for key, prepared in self._known.items() if prepared is not last}


def _key(modes: Modes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (modes, *((path, _described(leaf)) for path, leaf in flatten_with_paths((args, kwargs))))


def _described(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _read_only(graph: Graph) -> Graph:
    """The graph without parameters and buffers that nothing reads: another call need not have them."""
    read = {name for op in graph.ops for name in op.inputs} | {ref.name for ref in refs(graph.outputs)}
    parameters = tuple(p for p in graph.parameters if p.tensor in read)
    buffers = tuple(b for b in graph.buffers if b.tensor in read)
    gone = {*graph.sources} - {i.tensor for i in graph.inputs} - {c.tensor for c in graph.constants}
    gone -= {*(p.tensor for p in parameters), *(b.tensor for b in buffers)}
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name not in gone}
    return replace(graph, tensors=tensors, parameters=parameters, buffers=buffers)


def _flows(stages: Stages) -> list[Dataflow]:
    return [stages.largest(number).flow for number in stages.own]


def _places(flow: Dataflow) -> Iterator[tuple[tuple[str, ...], Place]]:
    """Of every parameter, by its paths, where this rank's part of it lies."""
    return ((entry.paths, flow.place_of(entry.tensor)) for entry in flow.graph.parameters)
