"""The module of a rank that runs stages of a pipeline: to the training loop a module like any other.

``loss = model(**batch); loss.backward()`` drives it. A schedule such as 1F1B runs backward passes before the last forward
pass, so where the model gives a scalar loss, the call runs the *whole* schedule with a gradient of one, and ``backward()``
scales what was kept back by the gradient that arrives (the backward pass is linear in it), sums it between replicas and
stages and gives it to the parameters. Where the model gives no scalar loss, or its loss is of all rows together
(:mod:`~shardwright.runtime.tail`), the call runs the forward passes, and ``backward()`` the backward passes, in the order of
the schedule. Without gradients only the forward passes run.

The loss is known on every rank. Other results are fetched from the stage that has them when every rank looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from shardwright._torch_compat import unflatten_tree
from shardwright.errors import RunError
from shardwright.frontend.containers import GIVEN, hand_back, restored_tree
from shardwright.frontend.replay import values_of
from shardwright.graph import Graph, Ref
from shardwright.operators import analyse
from shardwright.program.naming import closing_name
from shardwright.program.pipeline import Pipeline
from shardwright.program.recording import draws
from shardwright.program.steps import Line
from shardwright.program.tasks import Task
from shardwright.runtime.agreement import agree, contents, digest
from shardwright.runtime.border import Crossing, departure
from shardwright.runtime.calling import Calling, refuse_autocast, refuse_compiler_options, refuse_other_mode
from shardwright.runtime.fetched import Fetched, Telling
from shardwright.runtime.homeward import KeptBack
from shardwright.runtime.inputs import matched
from shardwright.runtime.mail import Mail, channels
from shardwright.runtime.meeting import WITH_GRADIENTS, WITHOUT_GRADIENTS, Meeting, kind
from shardwright.runtime.norms import AllStages, StageGradient, belongs_to
from shardwright.runtime.overflow import share_overflow
from shardwright.runtime.parts import Owning
from shardwright.runtime.passage import Passage, StagePart, only
from shardwright.runtime.passing import Passing
from shardwright.runtime.profiling import named
from shardwright.runtime.recorded_passes import pass_replay
from shardwright.runtime.same_rows import SameRows
from shardwright.runtime.shards import device_of
from shardwright.runtime.tail import Tail
from shardwright.runtime.ties import Tie


@dataclass(frozen=True, eq=False)
class Groups:
    """Whom a rank meets in the steps of a pipeline: the steps of all ranks, and the process groups that these need."""

    steps: tuple[tuple[Task, ...], ...]
    pairs: Mapping[tuple[int, int], Any]
    ties: tuple[Tie, ...]

    @staticmethod
    def of(pipeline: Pipeline) -> Groups:
        """Made once for a plan; every rank calls this."""
        steps = tuple(pipeline.steps(rank) for rank in range(dist.get_world_size()))
        pairs = channels(steps)
        return Groups(steps, pairs, tuple(Tie.of(pipeline, name, owners) for name, owners in pipeline.ties))


class PipelineModule(Owning):
    """One rank's stages of a pipeline. Made by :func:`shardwright.parallelize`, not by hand.

    It holds the parameters of its own stages under their original names.
    """

    own_names = ("pipeline", "mesh")

    def __init__(
        self,
        pipeline: Pipeline,
        parts: Mapping[tuple[int, int], StagePart],
        mesh: DeviceMesh,
        tensors: Mapping[str, torch.nn.Parameter | Tensor],
        decisions: Sequence[Any],
        aside: Mapping[str, Tensor],
        *,
        home: dict[str, Any],
        groups: Groups,
        workers: Line | None,
        calling: Calling | None = None,
        original: torch.nn.Module | None = None,
        compare_batches: int = 1,
    ) -> None:
        """``tensors`` are this rank's parameters and buffers, ``aside`` the buffers that preparing a batch reads, ``home``
        where the parts look parameters up: filled here; ``groups`` what the ranks meet in, which copies share; ``workers``
        the ranks that have stages, if this is one: others only look on."""
        super().__init__()
        self.pipeline, self.mesh, self._parts, self._calling = pipeline, mesh, parts, calling
        self._aside = dict(aside)
        graph = self.graph
        self._rank, self._device = dist.get_rank(), device_of(mesh)
        self._resemble(original)
        own = {name for part in parts.values() for name in part.part.graph.sources}
        parameters = [p for p in graph.parameters if p.tensor in own]
        self._own(parameters, [b for b in graph.buffers if b.tensor in own], tensors)
        home.update(self._home)
        every = groups.steps
        self._orders = {"whole": every, "forward": only(every, True), "backward": only(every, False)}
        self._mail = {name: Mail(steps, self._rank, self._device, groups.pairs) for name, steps in self._orders.items()}
        crossings = {key: _exits(part, decisions[key[0]]) for key, part in parts.items()}
        self._exits = {key: {name: c.forward for name, c in found.items()} for key, found in crossings.items()}
        self._returns = {key: {name: c.backward for name, c in found.items()} for key, found in crossings.items()}
        self._tail = None if pipeline.micro.tail is None else Tail(pipeline, aside, self._held, self._device)
        self._loss = None if self._tail is not None else _loss(graph)
        self._anchor = torch.empty(0, requires_grad=True)
        self._waiting: dict[int, KeptBack] = {}
        self._hold = self._met = False
        self._telling = Telling()
        self._replay = pass_replay(parts, pipeline.micro.sizes, len(every[self._rank]), self._device)
        self._workers = workers
        lines = [] if workers is None or dist.get_backend() == "fake" else [workers]
        self._meeting = Meeting(lines, torch.tensor(pipeline.workers), self._device)
        self._same_rows = _same_rows(graph, self._meeting, compare_batches, pipeline.workers)
        self._last_kind = 0
        self._ties = [tie for tie in groups.ties if tie.group is not None]
        self._compare_batches = compare_batches
        self._all_stages = AllStages.of(self._meeting, _idle(pipeline))
        self._shared = {tensor: len(owners) for tensor, owners in pipeline.ties}
        self._own_parameters = [p.tensor for p in parameters]
        self._show_stages()
        self._output_tree = restored_tree(graph.output_tree)
        owner = {place: number for number, part in enumerate(self._first_parts) for place, _ in part.results}
        self._holders = {place: pipeline.stages[number].ranks for place, number in owner.items()}
        self._made_by = owner
        drawn = any(draws(op, analyse(op, graph.tensors).kind) for op in graph.ops)
        self._mode_free = not graph.mutations and not drawn
        self.train(graph.training)

    @property
    def graph(self) -> Graph:
        return self.pipeline.micro.whole

    @property
    def _body(self) -> Graph:
        """The graph with the outputs that the micro-batches give."""
        return self.pipeline.micro.body

    @property
    def _backward_passes(self) -> tuple[Sequence[Task], Mail]:
        return self._orders["backward"][self._rank], self._mail["backward"]

    @property
    def _first_parts(self) -> Sequence[Any]:
        return next(iter(self.pipeline.parts.values()))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what this rank's stages compute, region by region, each half of a split backward pass by itself."""
        refuse_compiler_options(args, kwargs)
        for part in self._parts.values():
            part.executor.gradients.compiled = True

    @torch.compiler.disable  # a schedule is no graph: compile() takes what is between sends
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not PipelineModule:  # a hook of this very call has gone over to a plan without stages
            return type(self).forward(self, *args, **kwargs)
        refuse_autocast(self._device)
        if not self._mode_free:
            refuse_other_mode(self.training, self.graph.training)
        if self._calling is not None:
            args, kwargs = self._calling.arranged(args, kwargs)
        inputs = matched(self.graph, args, kwargs)
        if any(tensor.requires_grad for tensor in inputs.values()):
            raise RunError("A pipeline gives no gradients of its inputs.", "Detach them, or plan without stages.")
        if not self._met:
            agree({"batch": digest(name.encode() + contents(x) for name, x in inputs.items())})
            self._met = True
        self._telling.finish()
        trained = torch.is_grad_enabled() and any(parameter.trainable for parameter in self.graph.parameters)
        same = kind(WITH_GRADIENTS if trained else WITHOUT_GRADIENTS)
        self._same_rows(inputs, same, at_once=same != self._last_kind)
        self._last_kind = same
        given = self._prepared(inputs)
        if trained:
            leaves = Passing.apply(self, self._anchor, given)
        else:
            leaves = tuple(self._outputs_of(self._passed(given, "forward", keep=False)))
        found = {out.name: leaf for out, leaf in zip(_tensors(self._body), leaves, strict=True)}
        if self._tail is not None:
            found |= self._tail.outputs({**given, **found})
        outputs = [found[out.name] if isinstance(out, Ref) else out for out in self.graph.outputs]
        output = unflatten_tree(outputs, self._output_tree)
        if self._calling is not None and GIVEN in self.graph.output_tree:
            hand_back(output, self._calling.by_name(args, kwargs))
        return output

    def _prepared(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the call, and what is computed of them for the whole batch."""
        given = {name: tensor.detach().to(self._device) for name, tensor in inputs.items()}
        graph = self.pipeline.micro.prepared
        if graph is not None:
            with torch.no_grad():
                found = values_of(graph, given | self._aside, self._device)
            given |= {out.name: found[out.name] for out in graph.outputs if isinstance(out, Ref)}
        return given

    def _passed(self, given: Mapping[str, Tensor], which: str, keep: bool) -> Passage:
        passage = Passage(self.pipeline, self._parts, given, keep)
        if which == "whole":
            passage.arriving = self._one
            if self._replay is not None and not self._hold and not self._waiting:
                passage.passes = self._replay.passes([step.action for step in self._orders[which][self._rank]])
        passage.perform(self._orders[which][self._rank], self._mail[which])
        return passage

    def _one(self, place: int, microbatch: int) -> Tensor | None:
        """The gradient of the loss of a micro-batch: one."""
        if place != self._loss:
            return None
        name = self._body.outputs[place].name  # type: ignore[union-attr]  # the loss is a tensor
        meta = self.graph.tensors[name]
        return torch.ones(meta.shape, dtype=getattr(torch, meta.dtype), device=self._device)

    def _outputs_of(self, passage: Passage) -> Iterator[Tensor]:
        """The outputs of the batch, in order: a loss at once, others when they are looked at."""
        graph, micro = self._body, self.pipeline.micro
        for place, out in enumerate(graph.outputs):
            if not isinstance(out, Ref):
                continue
            meta, join = graph.tensors[out.name], micro.joins[place]
            mine = [passage.results.get((place, number)) for number in range(len(micro.sizes))]
            exits = [
                self._exits[self._made_by[place], size].get(out.name, ()) if mine[number] is not None else ()
                for number, size in enumerate(micro.sizes)
            ]
            ranks = self._holders[place]
            result = Fetched(mine, exits, join, ranks, meta.shape, getattr(torch, meta.dtype), self._device)
            if passage.keep and place == self._loss:
                yield result.whole(self._telling)
            else:
                yield result.whole() if meta.elements == 1 or self._loss is None else result

    def _hand_out(self, passage: Passage, scale: Tensor | None, scaled: bool) -> None:
        """Gradients that the passes kept back: scaled, kept for later, or summed and given to the parameters. ``scaled``:
        somebody may have scaled the loss and look for overflows."""
        for stage, kept in passage.passes.kept_back.items():
            total = self._waiting.setdefault(stage, {})
            for key, gradient in kept.items():
                mine = gradient if scale is None else gradient * scale.to(gradient.dtype)
                total[key] = total[key] + mine if key in total else mine
        if self._hold:
            return
        waiting, self._waiting = self._waiting, {}
        before: dict[str, Any] = {}
        for tie in self._ties:
            held = self._held(tie.tensor)
            # A gradient that was left may lie in a bucket, which now would not know that it is still wanted.
            before[tie.tensor], held.grad = None if held.grad is None else held.grad.clone(), None
        largest = max(self.pipeline.micro.sizes)
        for (stage, size), part in self._parts.items():
            if size == largest:
                with named(closing_name(stage)):
                    part.executor.bring_home(waiting.get(stage, {}))
        for tie in self._ties:
            if tie.trained:
                tie.add_up(self._held(tie.tensor), before[tie.tensor])
        self._show_stages()
        if scaled:
            share_overflow([p.grad for p in self.parameters() if p.grad is not None], self._device)
        self._telling.finish()

    def _twin(self, tensors: Mapping[str, torch.nn.Parameter | Tensor]) -> PipelineModule:
        about = {"calling": self._calling, "original": self, "compare_batches": self._compare_batches}
        return self._stages.module(tensors, self._aside, self._precision, **about)

    def _show_stages(self) -> None:
        """Gradients know that there are others on other ranks, so that norms of them are those of the whole model."""
        for tensor in self._own_parameters:
            gradient = self._held(tensor).grad
            if gradient is not None and not isinstance(gradient, StageGradient):
                belongs_to(gradient, self._all_stages, self._shared.get(tensor, 1))

    def _held(self, tensor: str) -> Any:
        place, key = self._home[tensor]
        return place[key]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients back: steps inside add up locally, the next one outside reduces the total."""
        self._hold, before = True, self._hold
        try:
            yield
        finally:
            self._hold = before


def _tensors(graph: Graph) -> list[Ref]:
    return [out for out in graph.outputs if isinstance(out, Ref)]


def _exits(part: StagePart, decisions: Any) -> dict[str, Crossing]:
    """For every result, the steps from this rank's part to the whole, and those of its gradient."""
    flow, numbers = part.executor.flow, part.results
    names = {name for _, name in part.part.results}
    return {name: departure(flow, decisions, numbers[name], part.rank.bound) for name in names}


def _loss(graph: Graph) -> int | None:
    """The place of the output that the backward pass starts from: the first scalar with a gradient."""
    for place, out in enumerate(graph.outputs):
        if isinstance(out, Ref) and graph.tensors[out.name].grad and not graph.tensors[out.name].shape:
            return place
    return None


def _idle(pipeline: Pipeline) -> list[int]:
    """Ranks that have stages, and nothing in them that is trained."""
    parts = next(iter(pipeline.parts.values()))
    busy = {
        rank
        for stage, part in zip(pipeline.stages, parts, strict=True)
        if any(parameter.trainable for parameter in part.graph.parameters)
        for rank in stage.ranks
    }
    return sorted(set(pipeline.workers) - busy)


def _same_rows(graph: Graph, meeting: Meeting, every: int, ranks: Sequence[int]) -> SameRows:
    """All ranks of a pipeline are given the whole batch, from which each takes its rows: it must be the same batch."""
    names = [entry.tensor for entry in graph.inputs if entry.tensor is not None]
    return SameRows(meeting, dict.fromkeys(names, (Replicate(),)), torch.tensor(ranks), every if meeting.lines else 0)
