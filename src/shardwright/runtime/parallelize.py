"""``parallelize``: from a model and a plan to the module of this rank.

Called alike on every rank of a ``torchrun`` job. The model is captured again (cheaply, nothing is computed), checked
against the plan, this rank's program is built, and its parameters are cut to the shards this rank holds at rest.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwright._torch_compat import map_tree
from shardwright.costs.deciding import ByPrice
from shardwright.errors import PlanError, RunError
from shardwright.frontend import capture
from shardwright.graph import Graph, fingerprint
from shardwright.graph.computation import computation
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.program import Decisions
from shardwright.runtime.agreement import agree, common_graph, digest, sample
from shardwright.runtime.assistant.asking import assist_if_asked
from shardwright.runtime.border import Inputs, Outputs
from shardwright.runtime.calling import Calling, example
from shardwright.runtime.checkpoint import load_weights
from shardwright.runtime.inputs import example_of
from shardwright.runtime.materialise import Initialise, is_checkpoint, materialised
from shardwright.runtime.module import ParallelModule
from shardwright.runtime.optimizers import update_locally
from shardwright.runtime.parts import look_at_hooks
from shardwright.runtime.pipeline import PipelineModule
from shardwright.runtime.pipelined import pipelined
from shardwright.runtime.profiling import profile_if_asked
from shardwright.runtime.programs import built
from shardwright.runtime.replanning import for_those_here
from shardwright.runtime.shards import device_of
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
) -> ParallelModule | PipelineModule:
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
    priced = isinstance(plan, Plan)
    plan = Plan.of(graph, plan) if isinstance(plan, Strategy) else plan
    plan.check(graph)
    plan = for_those_here(plan, graph)
    if not plan.whole:
        _refuse_options(mesh=mesh, recompute=recompute, decisions=decisions, inputs=inputs, outputs=outputs)
        staged = pipelined(
            model,
            plan,
            graph,
            device=device,
            weights=weights,
            strict=strict,
            initialise=initialise,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            keep=keep,
            compare_batches=compare_batches,
        )
        carry_over(before)
        profile_if_asked(staged, every_rank=True)
        assist_if_asked(staged)
        return staged
    strategy = plan.stages[0].strategy
    if recompute is not None:
        strategy = replace(strategy, recomputed=tuple(recompute), lightly=frozenset())
    refuse_uneven_rest(graph, strategy)
    mesh = mesh or device_mesh(strategy, device)
    _agree(model, graph, strategy)
    decisions = decisions_of(plan) if decisions is None else decisions
    # A plan made in evaluation mode has no backward pass; one is built when a call that wants gradients first comes.
    program = built(graph, strategy, decisions, coordinate_on(mesh), device_of(mesh), training=graph.training)
    template = Template.of(model, compute_dtype)
    shards = materialised(model, program.flow, mesh, weights, initialise, keep, strict)
    parallel = ParallelModule(
        program,
        decisions,
        mesh,
        shards,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        inputs=inputs,
        outputs=outputs,
        compare_batches=compare_batches,
        calling=Calling.of(model.forward, graph),
        template=template,
        judged_on=plan.meshes[0].device if priced else None,
        # In another precision than the plan's every call is another one.
        expected=tuple(plan.other_graphs(trusted=True)) if compute_dtype is None else (),
        original=model,
    )
    if weights is not None and is_checkpoint(weights):
        load_weights(parallel, weights, strict)
    parallel.__dict__["_plan"] = plan if priced else None
    carry_over(before)
    profile_if_asked(parallel)
    assist_if_asked(parallel)
    return parallel


def _refuse_options(**given: Any) -> None:
    """A pipeline has its meshes and decisions from its plan, takes whole batches and hands out whole results."""
    for name, value in given.items():
        if value is not None and value != "whole":
            raise RunError(f"{name}={value!r} means nothing for a plan with stages.", f"Leave {name} out.")


def refuse_uneven_rest(graph: Graph, strategy: Strategy) -> None:
    """Buffers are replaced by what a step computes in shares, and DTensors know equal shards only."""
    uneven = [axis for axis, (name, _) in enumerate(strategy.axes) if name in strategy.shares]
    for name in (buffer.tensor for buffer in graph.buffers):
        if any(isinstance(strategy.resting[name][axis], Shard) for axis in uneven):
            raise PlanError(
                f"{name} rests cut along a mesh axis with shares {dict(strategy.shares)}, which DTensors cannot express.",
                "Let it rest whole along that axis, or cut the axis evenly.",
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


def _agree(model: torch.nn.Module, graph: Graph, strategy: Strategy) -> None:
    held = (f"{name}{tuple(p.shape)}".encode() + sample(p) for name, p in model.named_parameters())
    chosen = (str((part, sorted(getattr(strategy, part).items()))) for part in ("splits", "resting", "kept"))
    agree(
        {
            "model": fingerprint(graph),
            "plan": digest(
                (
                    str(strategy.axes),
                    *chosen,
                    str(sorted(strategy.regathered)),
                    str((strategy.recomputed, sorted(strategy.lightly))),
                    str(sorted(strategy.whole_gradients)),
                    str(sorted(strategy.shares.items())),
                )
            ),
            "weights": digest(held),
        }
    )


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


def decisions_of(plan: Plan) -> Decisions:
    """What the plan decided about routes and sums of its first stage; the prices of its mesh decide what it leaves open."""
    return replace(plan.stages[0].decisions, otherwise=ByPrice(plan.meshes[0]))


def device_mesh(strategy: Strategy, device: torch.device | str | None = None) -> DeviceMesh:
    """A mesh over the default process group with the strategy's axes."""
    if not dist.is_initialized():
        raise RunError(
            "torch.distributed is not initialised.",
            "Start the script with torchrun (or `shardwright run`) and call torch.distributed.init_process_group() first.",
        )
    if dist.get_world_size() != strategy.devices:
        raise PlanError(
            f"The plan is for {strategy.devices} processes, and {dist.get_world_size()} are running.",
            f"Start with torchrun --nproc-per-node so that there are {strategy.devices} (`shardwright run` does), or plan "
            "for this number; where fewer devices were faster, `shardwright plan … --all-devices` insists on all.",
        )
    kind = torch.device(device).type if device is not None else ("cuda" if dist.get_backend() == "nccl" else "cpu")
    key, group = (kind, strategy.axes), dist.group.WORLD
    if _MESHES.get(None) is not group:  # another job in this process: nothing of the one before is of use
        _MESHES.clear()
        _MESHES[None] = group
    if key not in _MESHES:
        names = tuple(name for name, _ in strategy.axes)
        _MESHES[key] = init_device_mesh(kind, strategy.sizes, mesh_dim_names=names)
    return _MESHES[key]


_MESHES: dict[Any, Any] = {}
"""Meshes over the default process group, which stands beside them: made once, because each of several axes costs process
groups (NCCL communicators, threads of gloo). Models may share them: whatever is sent, all ranks send in the same order."""


def coordinate_on(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's place on every axis."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RunError("This process is not part of the device mesh.", "Give a mesh that covers every process.")
    return tuple(coordinate)
