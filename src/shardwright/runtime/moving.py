"""A running model goes over to another plan: between two steps, on all ranks together, without a restart.

Programs for the new plan are built beside those that run; only when every rank has told that its own are sound do
parameters, buffers and optimizer state move to where the new plan wants them (:mod:`~shardwright.runtime.recut`), and the
module becomes one that runs it. A rank that cannot run the new plan leaves all as they were. Other shares of an axis, other
blocks in the stages of a pipeline, another mesh, stages instead of one mesh: to a move all of these are two layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import PlanError, RunError, ShardwrightError
from shardwright.lowering.randomness import random_state, set_random_state
from shardwright.plans import Plan
from shardwright.runtime.module import ParallelModule
from shardwright.runtime.parts import Owning
from shardwright.runtime.pipeline import PipelineModule
from shardwright.runtime.pipelined import aside_of
from shardwright.runtime.programs import built
from shardwright.runtime.recut import Moving, Resting, resting
from shardwright.runtime.shards import device_of
from shardwright.runtime.stages import Stages

Ready = tuple[dict[str, Resting], Callable[[dict[str, Any]], Owning]]
"""Where everything will lie, and what makes a module of it."""


def move(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, plan: Plan) -> None:
    """Run a parallelized model by another plan for as many processes, from the next step on; all ranks call this alike.

    Parameters, their gradients, buffers and the state of ``optimizer`` move to where the plan wants them. Losses and
    parameters stay those of one process, the learning rate and whatever else the optimizer's groups hold stay as they are.

    Raises
    ------
    RunError, PlanError
        Where some rank cannot run the plan; then nothing has changed on any.

    Examples
    --------
    >>> shardwright.move(model, optimizer, shardwright.Plan.load("other.json"))                  # doctest: +SKIP
    """
    if not isinstance(model, ParallelModule | PipelineModule):
        raise RunError(
            f"A {type(model).__name__} is not a parallelized module.",
            "Call move() with what shardwright.parallelize() gave.",
        )
    _refuse_held_back(model)
    device = device_of(model.mesh)
    state = random_state(device)
    try:
        after, made = prepared(model, plan, device)
        held = {name: place[key] for name, (place, key) in model._home.items()}
        moving = Moving(model.graph, held, optimizer, resting_now(model), after, device)
        trouble = None
    except ShardwrightError as error:
        trouble = error
    finally:
        set_random_state(state, device)
    agree_on_moving(trouble, device)
    if isinstance(model, PipelineModule):  # stages have drawn by themselves, and ranks that looked on not at all
        drawn = [state]
        dist.broadcast_object_list(drawn, model.pipeline.workers[0])
        set_random_state(drawn[0], device)
    met = model._met
    model._become(made(moving.perform()))
    model._met = met


def agree_on_moving(trouble: ShardwrightError | None, device: torch.device) -> None:
    """Every rank is ready, or none moves: whoever is not says why, the others that somebody is not."""
    ready = torch.tensor([trouble is None], dtype=torch.int32, device=device)
    dist.all_reduce(ready, dist.ReduceOp.MIN)
    if trouble is not None:
        raise trouble
    if not bool(ready):
        raise RunError("Another rank cannot run this plan.", "Its own message says why; nothing has changed.")


def resting_now(model: ParallelModule | PipelineModule) -> dict[str, Resting]:
    """How parameters and buffers lie on all ranks."""
    if isinstance(model, PipelineModule):
        return model._stages.resting()
    program, mesh = model.program, model.mesh
    place = program.flow.place.coordinate
    return resting(program.graph, program.strategy, mesh.mesh.flatten().tolist(), mesh, place)


def prepared(model: ParallelModule | PipelineModule, plan: Plan, device: torch.device) -> Ready:
    """The programs of this rank under another plan, and what makes a module of them."""
    from shardwright.runtime.parallelize import coordinate_on, decisions_of, device_mesh, refuse_uneven_rest

    graph, calling = model.graph, model._calling
    plan.check(graph)
    _refuse_others(plan)
    pipelined = isinstance(model, PipelineModule)
    options = {} if pipelined else model._options
    precision = model._precision if pipelined else (options["compute_dtype"], options["reduce_dtype"])
    _refuse_parts(options)
    if not plan.whole or plan.devices < dist.get_world_size():
        stages = Stages.of(plan, graph, device.type, model._stages.known if pipelined else {})
        compare = options.get("compare_batches", 1)
        aside = _aside(model, stages)

        def stages_of(tensors: dict[str, Any]) -> Owning:
            about = {"calling": calling, "original": model, "compare_batches": compare}
            return stages.module(tensors, aside, precision, **about)

        return stages.resting(), stages_of
    strategy, decisions = plan.stages[0].strategy, decisions_of(plan)
    refuse_uneven_rest(graph, strategy)
    same = not pipelined and model.program.strategy.axes == strategy.axes
    mesh = model.mesh if same else device_mesh(strategy, device)
    place = coordinate_on(mesh)
    program = built(graph, strategy, decisions, place, device, training=graph.training)
    about = options or {"compute_dtype": precision[0], "reduce_dtype": precision[1], "calling": calling}

    def module_of(tensors: dict[str, Any]) -> Owning:
        made = ParallelModule(program, decisions, mesh, tensors, original=model, **about)
        made.__dict__["_plan"] = plan
        return made

    return resting(graph, strategy, mesh.mesh.flatten().tolist(), mesh, place), module_of


def _aside(model: ParallelModule | PipelineModule, stages: Stages) -> dict[str, Tensor]:
    """The buffers that preparing a batch reads: a pipeline has them whole, whatever its stages."""
    return dict(model._aside) if isinstance(model, PipelineModule) else aside_of(model, stages.pipeline, stages.device)


def _refuse_held_back(model: ParallelModule | PipelineModule) -> None:
    if model._waiting if isinstance(model, PipelineModule) else model._gradients.holding:
        raise RunError(
            "Gradients are held back by no_sync(), summed for the plan as it is now.",
            "Move after the pass that reduces them.",
        )


def _refuse_others(plan: Plan) -> None:
    """A plan may leave some processes out, which then only look on."""
    here = dist.get_world_size()
    if plan.ranks[-1] >= here:
        raise PlanError(
            f"The plan is for {plan.devices} processes, and {here} are running.",
            "Plan for those that are there; fewer or more start anew, from a checkpoint.",
        )


def _refuse_parts(options: dict[str, Any]) -> None:
    for name in ("inputs", "outputs"):
        if options.get(name, "whole") != "whole":
            raise RunError(
                f"{name}={options[name]!r} lie as the plan cuts them, and another plan cuts otherwise.",
                f"Use {name}='whole' for a model that goes over to other plans.",
            )
