"""This rank's stages of a plan, built and proved sound, before there are tensors to run them on.

``parallelize`` fills them with the parameters of a model, a move between plans with those that are there already, and a call
that differs from the planned one runs stages of its own on the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.plans.other_calls import trained
from shardwright.program import Decisions, Program
from shardwright.program.pipeline import Pipeline, check
from shardwright.program.steps import Line
from shardwright.program.validate import validate_program
from shardwright.runtime.agreement import together
from shardwright.runtime.meshes import known_mesh
from shardwright.runtime.point_to_point import Pair, channels
from shardwright.runtime.recut import Resting, resting
from shardwright.runtime.shards import device_of
from shardwright.runtime.ties import Tie


@dataclass(eq=False)
class Groups:
    """Whom a rank meets beside the meshes of its stages: process groups of pairs of ranks and of stages that share a
    parameter, made once by all ranks together. Stages of other calls and copies of a module share them."""

    pairs: dict[Pair, Any] = field(default_factory=dict)
    ties: dict[tuple[str, tuple[int, ...]], Tie] = field(default_factory=dict)

    def meet(self, pipeline: Pipeline) -> None:
        """Make those that this pipeline needs; every rank calls this."""
        steps = [pipeline.steps(rank) for rank in range(dist.get_world_size())]
        self.pairs |= channels(steps, self.pairs)
        for name, owners in pipeline.ties:
            if (name, owners) not in self.ties:
                self.ties[name, owners] = Tie.of(pipeline, name, owners)


@dataclass(frozen=True, eq=False)
class Stages:
    """The programs of this rank's stages, by stage and size of micro-batch, and what all stages have in common."""

    plan: Plan
    pipeline: Pipeline
    kind: str
    meshes: tuple[DeviceMesh, ...]
    decisions: tuple[Decisions, ...]
    programs: Mapping[tuple[int, int], Program]
    own: tuple[int, ...]
    groups: Groups
    asked: Decisions | None
    """Decisions that the caller of ``parallelize`` gave in place of the plan's."""

    @staticmethod
    def of(
        plan: Plan,
        graph: Graph,
        kind: str,
        *,
        groups: Groups | None = None,
        decisions: Decisions | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Stages:
        """Called alike on every rank. ``groups``: those of a module that there is already; ``mesh``: that of the only stage.

        Raises
        ------
        PlanError, LoweringError
        """
        pipeline = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule, plan.batch_norm)
        check(pipeline)
        meshes = tuple(mesh or known_mesh(stage.ranks, stage.strategy.axes, kind) for stage in plan.stages)
        rank = dist.get_rank()
        own = tuple(number for number, stage in enumerate(plan.stages) if rank in stage.ranks)
        found = tuple(
            decisions or replace(stage.decisions, otherwise=PricedDecisions(priced))
            for stage, priced in zip(plan.stages, plan.meshes, strict=True)
        )
        programs = {}
        with together("programs"):
            for number in own:
                for size in pipeline.parts:
                    programs[number, size] = one = pipeline.program(number, size, rank, found[number], device=kind)
                    validate_program(one)
        groups = groups or Groups()
        groups.meet(pipeline)
        return Stages(plan, pipeline, kind, meshes, found, programs, own, groups, decisions)

    def again(self, graph: Graph, plan: Plan | None = None) -> Stages:
        """Another call of the same module, in the same groups."""
        mesh = self.meshes[0] if len(self.meshes) == 1 else None
        chosen = plan or trained(self.plan)
        return Stages.of(chosen, graph, self.kind, groups=self.groups, decisions=self.asked, mesh=mesh)

    @property
    def graph(self) -> Graph:
        return self.pipeline.micro.whole

    @property
    def training(self) -> bool:
        """Whether there are passes back."""
        return self.pipeline.trains

    @property
    def device(self) -> torch.device:
        return device_of(self.mesh)

    @property
    def mesh(self) -> DeviceMesh:
        """That of this rank's first stage; any, where it has none."""
        return self.meshes[self.own[0] if self.own else 0]

    @property
    def everywhere(self) -> bool:
        """Whether one mesh of all ranks holds everything: then whatever is on this rank is on all of them, in parts or
        whole."""
        return len(self.plan.stages) == 1 and self.plan.devices == dist.get_world_size()

    @property
    def on_one_mesh(self) -> bool:
        """Whether that mesh also takes the batch in one go: then a call is a forward and a backward pass."""
        return self.everywhere and self.pipeline.reduces_inside

    @property
    def workers(self) -> Line | None:
        """All ranks that have stages, where this is one of them; every rank calls this, the first time."""
        ranks, rank = self.plan.ranks, dist.get_rank()
        mesh = known_mesh(ranks, (("workers", len(ranks)),), self.kind)
        return Line(mesh.get_group().group_name, len(ranks), ranks.index(rank)) if rank in ranks else None

    @property
    def lines(self) -> list[Line]:
        """Whom this rank tells what it is about to do: ranks along every axis of the one mesh, or all that have stages."""
        if not self.on_one_mesh:
            return [] if (line := self.workers) is None else [line]
        place, groups = self.largest(0).flow.place, axis_groups(self.mesh)
        lines = [place.line(axis) for axis in range(len(place.axes))]
        return [line._replace(group=groups[line.group]) for line in lines]

    @property
    def table(self) -> Tensor:
        """The ranks that :attr:`lines` are of, as they stand on the mesh."""
        return self.mesh.mesh if self.on_one_mesh else torch.tensor(self.plan.ranks)

    def largest(self, stage: int) -> Program:
        """The program of a stage for the largest micro-batches."""
        return self.programs[stage, max(self.pipeline.parts)]

    def resting(self) -> dict[str, Resting]:
        """How the parameters and buffers of all stages lie, on all ranks; those that several stages share lie on the ranks
        of all of them."""
        rank, found = dist.get_rank(), dict[str, Resting]()
        for number, part in enumerate(self.pipeline.parts[max(self.pipeline.parts)]):
            stage, mesh = self.plan.stages[number], self.meshes[number]
            coordinate = self.pipeline.coordinate(number, rank) if rank in stage.ranks else None
            for name, own in resting(part.graph, stage.strategy, stage.ranks, mesh, coordinate).items():
                first = found.get(name, own)
                shown = own if first.place is None else first
                found[name] = replace(shown, regions={**first.regions, **own.regions})
        return found


def axis_groups(mesh: DeviceMesh) -> dict[str, str]:
    """The process groups along the axes of a mesh, by the names of both."""
    return {name: mesh.get_group(name).group_name for name in mesh.mesh_dim_names or ()}
