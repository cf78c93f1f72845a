"""This rank's stages of a plan, built and proved sound, before there are tensors to run them on.

``parallelize`` fills them with the parameters of a model, a move between plans with those that are there already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.costs.deciding import ByPrice
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.program import Decisions, Program
from shardwright.program.pipeline import Pipeline, check
from shardwright.program.steps import Line
from shardwright.program.validate import validate_program
from shardwright.runtime.agreement import together
from shardwright.runtime.execution import Gradients, Rank
from shardwright.runtime.passage import StagePart
from shardwright.runtime.pipeline import Groups, PipelineModule
from shardwright.runtime.recut import Resting, resting
from shardwright.runtime.shards import constant, device_of
from shardwright.runtime.stage_executor import StageExecutor

Meshes = dict[tuple[Any, ...], DeviceMesh]
"""Meshes by their ranks and axes."""
Precision = tuple[torch.dtype | None, torch.dtype | None]
"""What parameters are cast to for use, and what gradients are reduced in."""


@dataclass(frozen=True, eq=False)
class Stages:
    """The programs of this rank's stages, by stage and size of micro-batch, and what all stages have in common."""

    plan: Plan
    pipeline: Pipeline
    meshes: tuple[DeviceMesh, ...]
    known: Meshes
    decisions: tuple[Decisions, ...]
    programs: Mapping[tuple[int, int], Program]
    own: tuple[int, ...]
    workers: Line | None
    """All ranks that have stages, on those ranks."""

    @staticmethod
    def of(plan: Plan, graph: Graph, kind: str, known: Meshes) -> Stages:
        """Called alike on every rank; ``known``: meshes that there are already, to which new ones are added.

        Raises
        ------
        PlanError, LoweringError
        """
        pipeline = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule, plan.batch_norm)
        check(pipeline)
        meshes, rank = _meshes(plan, kind, known), dist.get_rank()
        every = range(len(plan.stages))
        decisions = tuple(replace(plan.stages[n].decisions, otherwise=ByPrice(plan.meshes[n])) for n in every)
        own = tuple(number for number in every if rank in plan.stages[number].ranks)
        programs = {}
        with together("programs"):
            for number in own:
                split = pipeline.splits(number)
                for size in pipeline.parts:
                    one = pipeline.program(number, size, rank, decisions[number], device=kind, split=split)
                    validate_program(one)
                    programs[number, size] = one
        workers = _workers(pipeline.workers, kind, known)
        return Stages(plan, pipeline, meshes, known, decisions, programs, own, workers)

    @property
    def device(self) -> torch.device:
        return device_of(self.mesh)

    @property
    def mesh(self) -> DeviceMesh:
        """That of this rank's first stage; any, where it has none."""
        return self.meshes[self.own[0] if self.own else 0]

    def largest(self, stage: int) -> Program:
        """The program of a stage for the largest micro-batches."""
        return self.programs[stage, max(self.pipeline.parts)]

    def resting(self) -> dict[str, Resting]:
        """How the parameters and buffers of all stages lie, on all ranks."""
        return stages_resting(self.pipeline, self.meshes)

    @cached_property
    def groups(self) -> Groups:
        """Process groups, which every rank makes together: once, and copies of a module share them."""
        return Groups.of(self.pipeline)

    def module(
        self,
        tensors: Mapping[str, torch.nn.Parameter | Tensor],
        aside: Mapping[str, Tensor],
        precision: Precision,
        **options: Any,
    ) -> PipelineModule:
        """What runs these stages on these tensors; every rank calls this, the first time."""
        home: dict[str, Any] = {}
        parts: dict[tuple[int, int], StagePart] = {}
        for number in self.own:
            mesh, gradients = self.meshes[number], Gradients(hold=True)
            groups = {name: mesh.get_group(name).group_name for name, _ in self.plan.stages[number].strategy.axes}
            for size in self.pipeline.parts:
                one, part = self.programs[number, size], self.pipeline.parts[size][number]
                constants = [constant(c, one.flow, self.device) for c in part.graph.constants]
                place = Rank(mesh, self.device, groups, gradients, home, constants, *precision, "whole", "whole")
                parts[number, size] = StagePart.of(StageExecutor(one, place), part, place, self.decisions[number])
        made = PipelineModule(
            self.pipeline,
            parts,
            self.mesh,
            tensors,
            self.decisions,
            aside,
            home=home,
            groups=self.groups,
            workers=self.workers,
            **options,
        )
        made.__dict__["_stages"], made.__dict__["_precision"] = self, precision
        return made


def stages_resting(pipeline: Pipeline, meshes: tuple[DeviceMesh, ...]) -> dict[str, Resting]:
    """How parameters and buffers lie; those that several stages share lie on the ranks of all of them."""
    rank, found = dist.get_rank(), dict[str, Resting]()
    for number, part in enumerate(pipeline.parts[max(pipeline.parts)]):
        stage = pipeline.stages[number]
        coordinate = pipeline.coordinate(number, rank) if rank in stage.ranks else None
        for name, own in resting(part.graph, stage.strategy, stage.ranks, meshes[number], coordinate).items():
            first = found.get(name, own)
            shown = own if first.place is None else first
            found[name] = replace(shown, regions={**first.regions, **own.regions})
    return found


def _workers(ranks: tuple[int, ...], kind: str, known: Meshes) -> Line | None:
    """The line of all ranks that have stages, where this is one of them; every rank takes part in making it."""
    rank, group = dist.get_rank(), dist.group.WORLD
    if len(ranks) < dist.get_world_size():
        if (ranks, ()) not in known:
            known[ranks, ()] = DeviceMesh(kind, torch.tensor(ranks), mesh_dim_names=("workers",))
        group = known[ranks, ()].get_group() if rank in ranks else None
    return None if group is None or rank not in ranks else Line(group.group_name, len(ranks), ranks.index(rank))


def _meshes(plan: Plan, kind: str, known: Meshes) -> tuple[DeviceMesh, ...]:
    """The mesh of every stage; every rank takes part in making each of them."""
    meshes = []
    for stage in plan.stages:
        key = (stage.ranks, stage.strategy.axes)
        if key not in known:
            grid = torch.tensor(stage.ranks).reshape(stage.strategy.sizes)
            names = tuple(name for name, _ in stage.strategy.axes)
            known[key] = DeviceMesh(kind, grid, mesh_dim_names=names)
        meshes.append(known[key])
    return tuple(meshes)
