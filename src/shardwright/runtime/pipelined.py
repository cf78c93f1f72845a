"""From a model and a plan with stages to the module of this rank: its stages are built, and only their parameters kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import PlanError, RunError
from shardwright.graph import Graph, fingerprint
from shardwright.plans import Plan
from shardwright.plans.stages import stage_text
from shardwright.program.dataflow import Dataflow
from shardwright.program.pipeline import Pipeline
from shardwright.runtime.agreement import agree, digest, sample
from shardwright.runtime.calling import Calling
from shardwright.runtime.checkpoint import load_weights
from shardwright.runtime.materialise import Initialise, Shards, is_checkpoint, materialised, put_in_place
from shardwright.runtime.pipeline import PipelineModule
from shardwright.runtime.stages import Stages
from shardwright.runtime.taken_over import take_over


def pipelined(
    model: torch.nn.Module,
    plan: Plan,
    graph: Graph,
    *,
    device: torch.device | str | None = None,
    weights: str | Path | None = None,
    strict: bool = True,
    initialise: Initialise | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    keep: bool = False,
    compare_batches: int = 1,
) -> PipelineModule:
    """This rank's stages of ``model``; called alike on every rank.

    Raises
    ------
    RunError, PlanError, LoweringError
    """
    if not dist.is_initialized() or dist.get_world_size() != plan.devices:
        running = dist.get_world_size() if dist.is_initialized() else 0
        raise PlanError(
            f"The plan is for {plan.devices} processes, and {running} are running.",
            f"Start with torchrun --nproc-per-node {plan.devices} (`shardwright run` does).",
        )
    chosen = [json.dumps(stage_text(replace(stage, prediction=None))) for stage in plan.stages]
    held = (f"{name}{tuple(p.shape)}".encode() + sample(p) for name, p in model.named_parameters())
    decided = digest([*chosen, str(plan.schedule), str(plan.microbatches)])
    agree({"model": fingerprint(graph), "plan": decided, "weights": digest(held)})
    kind = torch.device(device).type if device is not None else ("cuda" if dist.get_backend() == "nccl" else "cpu")
    stages = Stages.of(plan, graph, kind, {})
    shards: Shards = {}
    for number in stages.own:
        flow = stages.largest(number).flow
        shards |= _materialised(model, flow, shards, stages.meshes[number], weights, initialise, keep, strict)
    aside = aside_of(model, stages.pipeline, stages.device)
    if not keep:
        _let_go(model, graph, shards)
    module = stages.module(
        shards,
        aside,
        (compute_dtype, reduce_dtype),
        calling=Calling.of(model.forward, graph),
        original=model,
        compare_batches=compare_batches,
    )
    if weights is not None and is_checkpoint(weights):
        names = (*(path for p in graph.parameters for path in p.paths), *(b.path for b in graph.buffers))
        load_weights(module, weights, strict, frozenset(names))
    return module


def _materialised(model: torch.nn.Module, flow: Dataflow, known: Shards, *options: Any) -> Shards:
    """The shards of one stage, without those that another stage of this rank has made already."""
    graph = flow.graph
    parameters = tuple(p for p in graph.parameters if p.tensor not in known)
    buffers = tuple(b for b in graph.buffers if b.tensor not in known)
    bare = replace(graph, ops=(), outputs=(), mutations=(), parameters=parameters, buffers=buffers)
    return materialised(model, replace(flow, graph=bare), *options)


def aside_of(model: torch.nn.Module, pipeline: Pipeline, device: torch.device) -> dict[str, Tensor]:
    """The buffers that preparing a batch and its tail read, whole: every rank computes these for itself."""
    graphs = [graph for graph in (pipeline.micro.prepared, pipeline.micro.tail) if graph is not None]
    read = {name for graph in graphs for op in graph.ops for name in op.inputs}
    found = {b.tensor: model.get_buffer(b.path) for b in pipeline.micro.whole.buffers if b.tensor in read}
    for name, tensor in found.items():
        if tensor.is_meta:
            raise RunError(
                f"The buffer {name} is on meta, and every rank of a pipeline needs it to prepare a batch.",
                "Build the model under parameters_on_meta(), which keeps buffers real.",
            )
    return {name: tensor.detach().clone().to(device) for name, tensor in found.items()}


def _let_go(model: torch.nn.Module, graph: Graph, shards: Shards) -> None:
    """What other ranks hold takes no memory here."""
    for parameter in graph.parameters:
        if parameter.tensor in shards:
            continue
        held = model.get_parameter(parameter.paths[0])
        if not held.is_meta:
            put_in_place(model, parameter.paths, torch.nn.Parameter(held.detach().to("meta"), held.requires_grad))
        take_over(held, None)
