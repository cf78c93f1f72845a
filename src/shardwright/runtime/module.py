"""The module that training loops see: DTensor parameters under their original names, driving one rank's programs.

``forward`` takes what the original module took and gives what it gave, whatever the plan: one mesh, stages, several
micro-batches. This rank holds the parameters of its own stages. Eagerly it executes their programs, instruction by
instruction; under ``torch.compile`` what one mesh computes is emitted with everything inline, which the compiler schedules
itself. A call that differs from the planned one has programs of its own under the same plan, made when it first comes
(:mod:`~shardwright.runtime.programs`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwright._torch_compat import flatten_tree
from shardwright.cluster import Device
from shardwright.errors import RunError
from shardwright.frontend.containers import hand_back
from shardwright.graph import Graph
from shardwright.operators.rules import Layout
from shardwright.plans import Plan
from shardwright.program import Decisions, Program
from shardwright.program.pipeline import Pipeline
from shardwright.runtime.agreement import agree, contents, digest
from shardwright.runtime.boundary_steps import Inputs, Outputs
from shardwright.runtime.calling import Calling, refuse_autocast, refuse_compiler_options
from shardwright.runtime.execution import Execution
from shardwright.runtime.handshake import NEW_CALL, WITH_GRADIENTS, WITHOUT_GRADIENTS, Handshake, kind
from shardwright.runtime.hugging_face import generate, save_pretrained
from shardwright.runtime.programs import ModuleContext, Prepared, Programs
from shardwright.runtime.rank import Gradients, Rank
from shardwright.runtime.rows import Rows
from shardwright.runtime.same_rows import SameRows
from shardwright.runtime.stages import Stages, axis_groups
from shardwright.runtime.step_end import StepEnd
from shardwright.runtime.submodules import SplitModel, original_of
from shardwright.runtime.template import Template

_PUBLIC = ("plan", "pipeline", "program", "graph", "mesh", "device", "groups", "gradients", "draws", "decisions")
"""What may be asked of a parallelized module where the original has nothing of that name."""

_OUR_WAY = {"generate": generate, "save_pretrained": save_pretrained}
"""Methods of originals that need every rank, or the model itself, and are done in a way of our own."""


@dataclass(frozen=True, eq=False)
class ModuleOptions:
    """What :func:`shardwright.parallelize` was asked for that every program of a module goes by, and what it found out."""

    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    inputs: Inputs = "whole"
    outputs: Outputs = "whole"
    compare_batches: int = 1
    calling: Calling | None = None
    template: Template | None = None
    judged_on: Device | None = None
    expected: tuple[Graph, ...] = ()


class ParallelModule(SplitModel):
    """One rank's share of a model. Made by :func:`shardwright.parallelize`, not by hand.

    ``plan``, ``graph``, ``pipeline`` (how it is cut), ``mesh`` (of this rank's first stage), ``device``, ``gradients`` and
    ``draws`` say how it runs, and where this rank runs one program, ``program``, ``groups`` and ``decisions``; where the
    model has something of that name itself, that is what is found.
    """

    def __init__(
        self,
        stages: Stages,
        tensors: Mapping[str, torch.nn.Parameter | Tensor],
        aside: Mapping[str, Tensor],
        options: ModuleOptions,
        original: torch.nn.Module | None = None,
    ) -> None:
        """``tensors`` holds this rank's parameters (as DTensors) and buffers (local) by the graph's names, ``aside`` the
        buffers that are read beside the stages, whole.

        ``original`` is the model that this stands for, or another module that does; nothing of it is kept but its shape.
        """
        super().__init__()
        self._options, self._aside, self._calling = options, dict(aside), options.calling
        self._graph, self._device, self._gradients = stages.graph, stages.device, Gradients()
        self._resemble(original)
        held = {name for program in stages.programs.values() for name in program.graph.sources}
        parameters = [p for p in self._graph.parameters if p.tensor in held]
        self._own(parameters, [b for b in self._graph.buffers if b.tensor in held], tensors)
        fake = dist.get_backend() == "fake"
        lines, ranks = stages.lines, stages.table
        self._handshake = Handshake(lines if stages.on_one_mesh or not fake else [], ranks, self._device)
        compared = options.compare_batches if lines and not fake and ranks.numel() > 1 else 0

        def watch(graph: Graph, resting: Mapping[str, Layout] | None) -> SameRows:
            names = [entry.tensor for entry in graph.inputs if entry.tensor is not None]
            layouts: Mapping[str, Layout] = dict.fromkeys(names, (Replicate(),) * len(lines))
            if options.inputs == "local" and resting is not None:
                layouts = {name: resting[name] for name in names}
            return SameRows(self._handshake, layouts, ranks, compared)

        self._rows = Rows(stages, options.calling) if options.inputs == "rows" else None
        rank = Rank(
            mesh=stages.mesh,
            device=self._device,
            groups={},
            gradients=self._gradients,
            home=self._home,
            constants=(),
            compute_dtype=options.compute_dtype,
            reduce_dtype=options.reduce_dtype,
            inputs="whole" if options.inputs == "rows" else options.inputs,
            outputs=options.outputs,
        )
        step_end = StepEnd(rank, stages, parameters, self._handshake)
        self._all_stages = step_end.all_stages
        # Kept out of the module tree: their state is this module's own, and names in state_dict() stay the original ones.
        self._plan, self._pipeline, self._mesh, self._stages = stages.plan, stages.pipeline, stages.mesh, stages
        self._planned = planned = Execution(stages, rank, self._aside, step_end)
        self._draws, alone = planned.draws, len(planned.parts) == 1
        self._program: Program | None = planned.program if alone else None
        self._decisions: Decisions | None = planned.decisions if alone else None
        self._groups: Mapping[str, str] | None = axis_groups(self._mesh) if alone else None
        self._met, self._last_kind = False, 0
        self._take_modes(original)
        around = ModuleContext(
            calling=options.calling,
            template=options.template,
            homes={path: self._home[p.tensor] for p in parameters for path in p.paths}
            | {buffer.path: self._home[buffer.tensor] for buffer in self._graph.buffers if buffer.tensor in held},
            watch=watch,
            judged_on=options.judged_on,
            expected=options.expected,
            modules=tuple(self.named_modules(remove_duplicate=False)),
            new_call=self._meet_for_new_call if compared else None,
        )
        self._programs = Programs(Prepared(watch, planned), around)

    def __getattr__(self, name: str) -> Any:
        if name in _OUR_WAY and hasattr(original_of(self)[0], name):
            return functools.partial(_OUR_WAY[name], self)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in _PUBLIC:
                raise
            found = self.__dict__[f"_{name}"]
            if found is None:
                raise RunError(
                    f"This rank runs {len(self._planned.parts)} programs, and `{name}` is that of one.",
                    "Ask its pipeline for the graphs of its stages.",
                ) from None
            return found

    if TYPE_CHECKING:
        plan: Plan
        pipeline: Pipeline
        program: Program
        graph: Graph
        mesh: DeviceMesh
        device: torch.device
        groups: Mapping[str, str]
        gradients: Gradients
        draws: bool
        decisions: Decisions

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what this rank computes, region by region (:mod:`~shardwright.runtime.regions`).

        Communication, memory and CUDA graphs stay as they are, and each half of a split backward pass is compiled by itself.
        In contrast to ``torch.compile(model)``, which takes the whole program, the time it takes does not grow with the
        number of equal blocks.
        """
        refuse_compiler_options(args, kwargs)
        self._gradients.compiled = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        refuse_autocast(self._device)
        if not torch.compiler.is_compiling():
            return self._called(args, kwargs)
        if not self._stages.on_one_mesh:  # a schedule is no graph: compile() takes what is between sends
            return self._beside_the_compiler(args, kwargs)
        if self._calling is not None:
            args, kwargs = self._calling.arranged(args, kwargs)
        leaves = flatten_tree((args, kwargs))[0]
        if self._rows is not None:
            raise RunError("A compiled module takes no rows.", "Give it whole batches, or run it eagerly.")
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise RunError("A compiled module gives no gradients of its inputs.", "Run it eagerly, or detach them.")
        if self._programs.planned.returns_arguments:
            raise RunError("A compiled module does not change the objects it is given.", "Run it eagerly.")
        return self._planned.compiled(leaves)

    @torch.compiler.disable
    def _beside_the_compiler(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._rows is not None:
            args, kwargs = self._rows.batch(args, kwargs)
        prepared, inputs = self._programs.find(args, kwargs)
        if not self._met:
            self._meet(inputs)
        same = kind(WITH_GRADIENTS if torch.is_grad_enabled() else WITHOUT_GRADIENTS, prepared.number)
        drawn = prepared.draws and self._stages.on_one_mesh  # stages draw by themselves
        # Going over from training to evaluation is where ranks part: there the host waits until it knows.
        prepared.same_rows(inputs, same, torch.get_rng_state() if drawn else None, same != self._last_kind)
        self._last_kind = same
        output = self._programs.execution(prepared, inputs)(inputs)
        if prepared.returns_arguments and self._calling is not None:
            hand_back(output, self._calling.by_name(args, kwargs))
        return output

    def _meet_for_new_call(self) -> None:
        """Before a capture of some seconds, which others would wait for in a call of their own."""
        if self._met:
            self._handshake.tell(kind(NEW_CALL), at_once=True)

    def _meet(self, inputs: Mapping[str, Tensor]) -> None:
        """Before the first step: are all ranks there, with the same whole batch, byte by byte?"""
        whole = self._planned.rank.inputs == "whole"
        given = (name.encode() + contents(x) for name, x in inputs.items() if whole and not isinstance(x, DTensor))
        agree({"batch": digest(given)})
        self._met = True

    def _twin(self, tensors: Mapping[str, torch.nn.Parameter | Tensor]) -> ParallelModule:
        return ParallelModule(self._stages, tensors, self._aside, self._options, original=self)

    def _take_modes(self, original: torch.nn.Module | None) -> None:
        """Every module is in the mode that it was captured in."""
        self.train(self._graph.training)
        if original is not None and original.training == self._graph.training:
            modes = {path: module.training for path, module in original.named_modules(remove_duplicate=False)}
            for path, module in self.named_modules(remove_duplicate=False):
                module.training = modes.get(path, module.training)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients back: backward passes inside add up locally, the next one outside reduces the total."""
        self._gradients.hold, before = True, self._gradients.hold
        try:
            yield
        finally:
            self._gradients.hold = before
