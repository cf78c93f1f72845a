"""A running model goes over to another plan: between two steps, on all ranks together, without a restart.

Programs for the new plan are built beside those that run; only when every rank has told that its own are sound do
parameters, buffers and optimizer state move to where the new plan wants them (:mod:`~shardwright.runtime.recut`), and the
module becomes one that runs it. A rank that cannot run the new plan leaves all as they were. Other shares of an axis, other
blocks in the stages of a pipeline, another mesh, stages instead of one mesh: to a move all of these are two layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shardwright.errors import RunError, ShardwrightError
from shardwright.lowering.randomness import random_state, set_random_state
from shardwright.plans import Plan
from shardwright.runtime.materialise import aside_of, refuse_uneven_rest
from shardwright.runtime.meshes import check_processes
from shardwright.runtime.module import ModuleOptions, ParallelModule
from shardwright.runtime.recut import Moving, Resting
from shardwright.runtime.shards import device_of
from shardwright.runtime.stages import Stages
from shardwright.runtime.submodules import SplitModel

Ready = tuple[dict[str, Resting], Callable[[dict[str, Any]], SplitModel]]
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
    if not isinstance(model, ParallelModule):
        raise RunError(
            f"A {type(model).__name__} is not a parallelized module.",
            "Call move() with what shardwright.parallelize() gave.",
        )
    refuse_held_back(model)
    device = device_of(model.mesh)
    state = random_state(device)
    try:
        after, made = prepared(model, plan, device)
        held = {name: place[key] for name, (place, key) in model._home.items()}
        moving = Moving(model.graph, held, optimizer, model._stages.resting(), after, device)
        trouble = None
    except ShardwrightError as error:
        trouble = error
    finally:
        set_random_state(state, device)
    agree_on_moving(trouble, device)
    if not model._stages.everywhere:  # stages have drawn by themselves, and ranks that looked on not at all
        drawn = [state]
        dist.broadcast_object_list(drawn, model.plan.ranks[0])
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


def prepared(model: ParallelModule, plan: Plan, device: torch.device) -> Ready:
    """The programs of this rank under another plan, and what makes a module of them."""
    graph, options = model.graph, model._options
    plan.check(graph)
    check_processes(plan, exactly=False)
    for stage in plan.stages:
        refuse_uneven_rest(graph, stage.strategy)
    known = model._stages
    ours, theirs = ([(s.ranks, s.strategy.axes) for s in one.stages] for one in (known.plan, plan))
    mesh = known.mesh if ours == theirs and len(ours) == 1 else None
    before, after = ([replace(stage.strategy, shares={}) for stage in one.stages] for one in (known.plan, plan))
    shares_alone = mesh is not None and before == after
    if not shares_alone:
        _refuse_parts(options)
    stages = Stages.of(plan, graph, device.type, decisions=known.asked if shares_alone else None, mesh=mesh)
    aside = aside_of(model, stages) if known.on_one_mesh else dict(model._aside)
    return stages.resting(), lambda tensors: ParallelModule(stages, tensors, aside, options, original=model)


def refuse_held_back(model: ParallelModule) -> None:
    if model._gradients.holding:
        raise RunError(
            "Gradients are held back by no_sync(), summed for the plan as it is now.",
            "Move after the pass that reduces them.",
        )


def _refuse_parts(options: ModuleOptions) -> None:
    for name, value in (("inputs", options.inputs), ("outputs", options.outputs)):
        if value != "whole":
            raise RunError(
                f"{name}={value!r} lie as the plan cuts them, and another plan cuts otherwise.",
                f"Use {name}='whole' for a model that goes over to other plans.",
            )
