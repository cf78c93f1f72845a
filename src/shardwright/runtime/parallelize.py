"""``parallelize``: from a model and a plan to the module of this rank.

Called alike on every rank of a ``torchrun`` job. The model is captured again (cheaply, nothing is computed), checked
against the plan, this rank's program is built, and its parameters are cut to the shards this rank holds at rest.
"""

from __future__ import annotations

import functools
import gc
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import map_tree
from shardwright.errors import PlanError, RunError
from shardwright.frontend import capture
from shardwright.graph import Graph, fingerprint
from shardwright.graph.computation import computation
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.plans.stages import stage_text
from shardwright.program import Decisions
from shardwright.runtime.agreement import agree, common_graph, digest, sample
from shardwright.runtime.assistant.starting import assist_if_asked
from shardwright.runtime.boundary_steps import Inputs, Outputs
from shardwright.runtime.calling import Calling, example
from shardwright.runtime.checkpoint import load_weights
from shardwright.runtime.inputs import example_of
from shardwright.runtime.materialise import Initialise, aside_of, is_checkpoint, materialised, refuse_uneven_rest
from shardwright.runtime.meshes import check_processes, kind_of_device
from shardwright.runtime.module import ModuleOptions, ParallelModule
from shardwright.runtime.optimizers import update_locally
from shardwright.runtime.profiling import profile_if_asked
from shardwright.runtime.replanning import for_those_here
from shardwright.runtime.stages import Stages
from shardwright.runtime.submodules import look_at_hooks
from shardwright.runtime.taken_over import carry_over
from shardwright.runtime.template import Template, with_tensors
from shardwright.runtime.torchrun import plan_of_job


def parallelize(
    model: torch.nn.Module,
    plan: Union[Plan, Strategy, None] = None,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    graph: Graph | None = None,
    weights: str | Path | None = None,
    strict: bool = True,
    initialise: Initialise | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    recompute: Sequence[str] | None = None,
    keep: bool = False,
    inputs: Inputs = "whole",
    outputs: Outputs = "whole",
    decisions: Decisions | None = None,
    compare_batches: int = 1,
) -> ParallelModule:
    """This rank's share of ``model``, split as the plan says; train it with an ordinary loop.

    As with ``fully_shard``, the model is taken over: its parameters become this rank's shards (DTensors) one by one, so
    that no second copy of it ever exists. Optimizers are made from the parameters of the result; those that were made from
    the model's before go on with the shards, and any other use of the old parameters is refused.

    Parameters
    ----------
    model
        The unmodified model, the same on every rank.
    plan
        A :class:`~shardwright.plans.Plan`, or a bare strategy; without one, the plan ``shardwright run`` was given.
    args, kwargs
        Example inputs; only needed where the plan does not remember them (bare strategies, nested inputs).
    mesh
        A device mesh with the plan's axes; made from the default process group if not given.
    graph
        The captured model, where the caller has it already.
    weights
        Where to read the parameters: a ``safetensors`` file or folder, or a ``torch.distributed.checkpoint`` directory.
    strict
        Whether the stored names must be exactly the model's; if not, what is missing stays as it is (or is initialised).
    initialise
        For a model on meta without ``weights``: fills one module's own parameters (default: its ``reset_parameters``).
    compute_dtype, reduce_dtype
        Mixed precision: parameters are kept as the model has them and cast for use; gradients are reduced in
        ``reduce_dtype`` (default: the dtype they are computed in).
    recompute
        Paths of blocks (``"blocks.0"``) whose activations are computed again in the backward pass (default: the plan's).
    keep
        Leave ``model`` as it is, for another use of it, and copy what is needed.
    inputs
        What plain tensors given to the result are: ``"whole"``, the same on every rank, ``"rows"``, those that this rank
        has read (:func:`shardwright.sampler`), or ``"local"``, its part as the plan cuts it. DTensors are always taken.
    outputs
        What comes out where a result is cut: ``"whole"`` tensors, put together when first used (on every rank), this
        rank's ``"local"`` part, or a ``"dtensor"``. A gradient always lies as its tensor does.
    decisions
        Routes, sums between replicas, sizes of bundles and buckets (default: the plan's); the same on every rank.
    compare_batches
        After how many calls the ranks compare the digests of their batches where those must be the same (0: never).

    Examples
    --------
    >>> model = shardwright.parallelize(model, plan)                          # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(model.parameters())                     # doctest: +SKIP
    >>> loss = model(tokens, targets); loss.backward(); optimizer.step()      # doctest: +SKIP
    """
    plan = plan_of_job() if plan is None else plan
    before = [] if keep else [weakref.ref(parameter) for parameter in model.parameters()]
    update_locally()
    _refuse_shards(model)
    look_at_hooks(model)
    if graph is None:
        captured = model if compute_dtype is None else with_tensors(model, "meta", compute_dtype)
        if isinstance(plan, Plan):
            plan.check_parameters(captured.named_parameters(remove_duplicate=False))
        graph = _captured(captured, plan, args, kwargs)
        del captured
        gc.collect()  # what export leaves behind refers to the model in cycles, and would keep its tensors alive
    graph = _common(plan, graph)
    # A bare strategy knows neither the devices' memory nor other calls.
    judged_on = plan.meshes[0].device if isinstance(plan, Plan) else None
    plan = Plan.of(graph, plan) if isinstance(plan, Strategy) else plan
    plan.check(graph)
    plan = _as_asked(for_those_here(plan, graph), mesh, recompute)
    _refuse_parts(plan, inputs=inputs, outputs=outputs)
    for stage in plan.stages:
        refuse_uneven_rest(graph, stage.strategy)
    check_processes(plan)
    _agree(model, graph, plan)
    stages = Stages.of(
        plan, graph, kind_of_device(mesh.device_type if mesh else device), decisions=decisions, mesh=mesh
    )
    options = ModuleOptions(
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        inputs=inputs,
        outputs=outputs,
        compare_batches=compare_batches,
        calling=Calling.of(model.forward, graph),
        template=Template.of(model, compute_dtype),
        judged_on=judged_on,
        # In another precision than the plan's every call is another one.
        expected=tuple(plan.other_graphs(trusted=True)) if compute_dtype is None else (),
    )
    aside = aside_of(model, stages)
    shards = materialised(model, stages, weights, initialise, keep, strict)
    parallel = ParallelModule(stages, shards, aside, options, original=model)
    if weights is not None and is_checkpoint(weights):
        load_weights(parallel, weights, strict)
    carry_over(before)
    profile_if_asked(parallel, every_rank=not stages.everywhere)
    assist_if_asked(parallel)
    return parallel


def _as_asked(plan: Plan, mesh: DeviceMesh | None, recompute: Sequence[str] | None) -> Plan:
    """The plan on this mesh, with these blocks computed again."""
    if mesh is None and recompute is None:
        return plan
    if len(plan.stages) > 1:
        given = "mesh" if mesh is not None else "recompute"
        raise RunError(f"{given} is that of one mesh, and the plan has {len(plan.stages)}.", f"Leave {given} out.")
    (stage,) = plan.stages
    if mesh is not None:
        if mesh.size() != len(stage.ranks):
            raise PlanError(
                f"The plan is for {len(stage.ranks)} processes, and the mesh has {mesh.size()}.",
                "Give a mesh with the axes of the plan.",
            )
        stage = replace(stage, ranks=tuple(mesh.mesh.flatten().tolist()))
    if recompute is not None:
        stage = replace(stage, strategy=replace(stage.strategy, recomputed=tuple(recompute), lightly=frozenset()))
    return replace(plan, stages=(stage,))


def _refuse_parts(plan: Plan, **given: Any) -> None:
    """Parts of a batch belong to the mesh that cuts it in one go."""
    several = len(plan.stages) > 1 or plan.microbatches > 1
    for name, value in given.items():
        if several and value in ("local", "dtensor"):
            raise RunError(
                f"{name}={value!r} are parts of a batch that one mesh cuts in one go: cut into {plan.microbatches} "
                f"micro-batches for {len(plan.stages)} stages, what a rank has of it is no one region, or none.",
                f"Leave {name} out" + (", or give inputs='rows'." if name == "inputs" else "."),
            )


def _refuse_shards(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise RunError(
                f"The parameter {name} is a DTensor: this model has been split already.",
                "Use what parallelize() gave the first time; to split a model twice, call it with keep=True.",
            )


def _common(plan: Union[Plan, Strategy], graph: Graph) -> Graph:
    """One graph for all ranks, where theirs differ in the order of operators alone: the plan's, or that of rank 0."""
    if not isinstance(plan, Plan):
        return common_graph(graph)
    if plan.captured is None or fingerprint(graph) == plan.signature.fingerprint:
        return graph
    own = plan.graph(trusted=True)  # only taken where it computes exactly what this process has captured itself
    return own if computation(own) == computation(graph) else graph


def _agree(model: torch.nn.Module, graph: Graph, plan: Plan) -> None:
    held = (f"{name}{tuple(p.shape)}".encode() + sample(p) for name, p in model.named_parameters())
    chosen = [json.dumps(stage_text(replace(stage, prediction=None))) for stage in plan.stages]
    agree({"model": fingerprint(graph), "plan": digest([*chosen, str(plan.schedule)]), "weights": digest(held)})


def _captured(
    model: torch.nn.Module, plan: Union[Plan, Strategy], args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> Graph:
    if args is None and kwargs is None:
        if not isinstance(plan, Plan):
            raise RunError("A bare strategy does not know the model's inputs.", "Pass args and kwargs.")
        # Only the arguments are asked for: whatever operators the plan's graph names, nothing of it is run.
        known = plan.captured is not None
        args, kwargs = example(plan.graph(trusted=True)) if known else example_of(plan.signature.inputs)
        own = next(iter(model.parameters()), None)
        if own is not None and own.device.type != "meta":
            args, kwargs = map_tree(functools.partial(_on, own.device), (args, kwargs))
    return capture(model, tuple(args or ()), kwargs)


def _on(device: torch.device, value: Any) -> Any:
    """Values for shapes only; export runs nothing."""
    zeros = isinstance(value, torch.Tensor)
    return torch.zeros(value.shape, dtype=value.dtype, device=device) if zeros else value
