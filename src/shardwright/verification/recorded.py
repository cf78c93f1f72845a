"""A few steps of training, with everything a comparison needs kept: losses, outputs, gradients, parameters, buffers.

AdamW divides by the gradient's size, so rounding noise on a gradient that is zero in theory (the bias of an attention's
keys) moves a parameter by whole steps of the learning rate, and from then on two float32 runs are at different points. A
run is therefore also taken apart: :func:`retraced` computes loss and gradients on one process at the very parameters the
run had before each step, and :func:`replayed` computes what AdamW, on one process, makes of the run's gradients.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwright._torch_compat import flatten_tree, flatten_with_paths, map_tree
from shardwright.errors import RunError
from shardwright.frontend.containers import trained_on
from shardwright.frontend.prune import assumptions
from shardwright.graph import Graph
from shardwright.lowering.collectives import Ledger, counting
from shardwright.runtime import ParallelModule
from shardwright.runtime.inputs import readable
from shardwright.verification.batches import Batch, Steps
from shardwright.verification.draws import Draws, handing_out
from shardwright.verification.gathering import Gathered, gathered

LOSS_SCALE = 0.37
"""Losses are scaled before they go back, as a scaler of gradients does it: a scale that gets lost is seen."""
LEARNING_RATE = 1e-3
EPSILON = 1e-8


def adamw(parameters: Mapping[str, Tensor], rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    """The optimizer of runs that bring none."""
    return torch.optim.AdamW(parameters.values(), lr=rate, eps=EPSILON, weight_decay=0.01)


class Training(NamedTuple):
    """How a run trains: what scales its losses, its optimizer for parameters by name, what happens to gradients before an
    update (given the optimizer and the step, counted from zero), and how many roundings an update may differ."""

    scale: float = LOSS_SCALE
    optimizer: Callable[[Mapping[str, Tensor]], torch.optim.Optimizer] = adamw
    before_update: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, step: None
    roundings: float = 4.0


OURS = Training()
SMALL_UPDATES = Training(optimizer=functools.partial(adamw, rate=LEARNING_RATE / 1000))


def training_of(graph: Graph) -> Training:
    """How a captured model is trained: where it has looked at its data, so that what it decided stays decided. An expert
    that gets one row more after the first update would be another graph's (LongCat-Flash)."""
    return SMALL_UPDATES if assumptions(graph) else OURS


class Copies(NamedTuple):
    """How far the copies of a tensor that several ranks hold differ; ``rank`` is the one that differs most."""

    what: str
    name: str
    spread: float
    rank: int
    size: float


@dataclass
class Run:
    """What a training run leaves behind, whole tensors by their names in the model.

    ``before``, ``outputs`` and ``gradients`` (those of floating-point inputs among them, as ``input …``) are the parameters
    before each step, what the model returned and the gradients in it, ``parameters`` and ``buffers`` those after the last.
    The loss of a step is the mean of its passes. ``draws`` are the random numbers of every pass of every step, where the
    model shows them, ``copies`` says how far the ranks agree among themselves about all of these, ``sent`` what the first
    step communicated.
    """

    losses: list[float] = field(default_factory=list)
    before: list[dict[str, Tensor]] = field(default_factory=list)
    outputs: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    draws: list[list[list[Tensor]]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    copies: list[Copies] = field(default_factory=list)
    sent: Ledger | None = None


def train(
    model: torch.nn.Module,
    steps: Steps,
    keep: bool,
    together: bool = False,
    shows: bool = False,
    inputs: bool = True,
    how: Training = OURS,
) -> Run:
    """Train (with AdamW, unless ``how`` says otherwise) and keep what is to be compared.

    ``together``: all ranks train this model, each its share, and rank 0 learns what the others hold (``keep`` is false on
    the others, which only take part). ``shows``: the model returns its draws too. ``inputs``: the last pass of the last
    step also asks for the gradients of the inputs. Under ``torch.no_grad`` the model is called, not trained: there are
    outputs, no gradients.
    """
    run, stages = Run(), isinstance(model, ParallelModule) and len(model.plan.stages) > 1

    def whole(when: str, **kinds: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Tensors of several kinds, brought together at once: each time the ranks meet four times."""
        named = {(what, name): tensor for what, tensors in kinds.items() for name, tensor in tensors.items()}
        found = gathered(named, together, stages)
        run.copies += _copies(found, when)
        for kind in kinds:
            yield {name: x for (what, name), x in found.tensors.items() if what == kind} if keep else {}

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = how.optimizer(trained) if trained else None  # a stage may have none
    for step, batches in enumerate(steps, 1):
        (before,) = whole(f" before step {step}", parameter=dict(model.named_parameters()))
        run.before.append(before)
        model.zero_grad()
        with counting() if step == 1 else nullcontext() as performed:
            made = _step(model, batches, inputs and step == len(steps), shows, how.scale)
        run.sent = run.sent or performed
        losses, outputs, gradients, draws = whole(
            f" at step {step}", loss=made.losses, output=made.outputs, gradient=made.gradients, draw=made.draws
        )
        run.losses.append(statistics.mean(map(float, losses.values())) if keep else float("nan"))
        run.outputs.append(outputs)
        run.gradients.append(gradients)
        count = len(draws) // len(batches)
        run.draws.append([list(draws.values())[n * count : (n + 1) * count] for n in range(len(batches))])
        if optimizer is not None:
            how.before_update(optimizer, step - 1)
            optimizer.step()
    run.parameters, run.buffers = whole(
        " at the end", parameter=dict(model.named_parameters()), buffer=dict(model.named_buffers())
    )
    return run


def retraced(
    model: torch.nn.Module,
    batches: Sequence[Batch],
    parameters: Mapping[str, Tensor],
    inputs: bool = True,
    scale: float = LOSS_SCALE,
) -> Run:
    """What ``model`` computes on this process in a step that starts from these parameters.

    ``inputs`` says whether their gradients are wanted too.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
            parameter.grad = None
    made = _step(model, batches, inputs, shows=False, scale=scale)
    kept = (made.outputs, made.gradients, dict(model.named_buffers()))
    outputs, gradients, buffers = (gathered(tensors, False).tensors for tensors in kept)
    loss = statistics.mean(float(loss) for loss in made.losses.values())
    return Run(losses=[loss], outputs=[outputs], gradients=[gradients], buffers=buffers)


def replayed(start: Mapping[str, Tensor], run: Run, how: Training = OURS) -> list[dict[str, Tensor]]:
    """The parameters after every step that the optimizer makes, on one process, of ``start`` and a run's gradients."""
    parameters = {name: torch.nn.Parameter(tensor.detach().clone()) for name, tensor in start.items()}
    trained = [name for name in parameters if any(name in gradients for gradients in run.gradients)]
    optimizer = how.optimizer({name: parameters[name] for name in trained}) if trained else None
    after = []
    for step, gradients in enumerate(run.gradients):
        for name in trained:
            gradient = gradients.get(name)  # a copy: what happens to it before the update is not the run's
            parameters[name].grad = None if gradient is None else gradient.clone()
        if optimizer is not None:
            how.before_update(optimizer, step)
            optimizer.step()
        after.append({name: parameter.detach().clone() for name, parameter in parameters.items()})
    return after


class _Made(NamedTuple):
    """The losses of the passes of one step, every tensor that the model returned or drew, and every gradient."""

    losses: dict[str, Tensor]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    draws: dict[str, Tensor]


def _step(model: torch.nn.Module, batches: Sequence[Batch], inputs: bool, shows: bool, scale: float) -> _Made:
    """All passes of one step: their gradients are added up, those of replicas in the last pass."""
    made, trained = _Made({}, {}, {}, {}), dict[str, Tensor](model.named_parameters())
    for number, batch in enumerate(batches, 1):
        last = number == len(batches)
        when = "" if last else f" of pass {number}"
        held_back = getattr(model, "no_sync", nullcontext)
        with nullcontext() if last or not torch.is_grad_enabled() else held_back():
            trained |= _pass(model, batch, inputs and last, shows, made, when, scale)
    found = {name: tensor.grad for name, tensor in trained.items() if tensor.grad is not None}
    return made._replace(gradients=found)


def _pass(
    model: torch.nn.Module, batch: Batch, inputs: bool, shows: bool, made: _Made, when: str, scale: float
) -> dict[str, Tensor]:
    """One pass; gives the inputs that ask for a gradient."""
    # Containers of its own for every pass: a model may write into those that it is given (Hugging Face's caches grow).
    args, kwargs = map_tree(_asking if inputs else (lambda leaf: leaf), (batch.args, dict(batch.kwargs)))
    if batch.draws is not None:
        handing_out(model, Draws(batch.draws, final=True))
    with _Wanted():
        found = model(*args, **kwargs)
        output, drawn = found if shows else (found, ())
        output = trained_on(output)
    loss = loss_of(output)
    made.losses["loss" + when] = loss.detach()
    made.outputs.update(
        {f"output{path}{when}": leaf for path, leaf in flatten_with_paths(output) if isinstance(leaf, Tensor)}
    )
    made.draws.update({f"{place}{when}": drawn[place] for place in range(len(drawn))})
    if torch.is_grad_enabled():
        (loss * scale).backward()
    leaves = flatten_with_paths((args, kwargs)) if inputs else []
    return {f"input {readable(path)}": x for path, x in leaves if isinstance(x, Tensor) and x.requires_grad}


class _Wanted(TorchFunctionMode):
    """Models say of a tensor made of their inputs that it wants a gradient (those that hear, for checkpointing). Where the
    inputs ask for theirs it has one, and PyTorch refuses to be told so of a tensor that is no leaf."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function == torch.Tensor.requires_grad.__set__ and args[1] and args[0].requires_grad:  # type: ignore[attr-defined]
            return None
        return function(*args, **(kwargs or {}))


def _asking(leaf: Any) -> Any:
    """A leaf of a call that asks for its gradient, if it can have one."""
    differentiable = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return leaf.detach().clone().requires_grad_() if differentiable else leaf


def loss_of(output: Any) -> Tensor:
    """The scalar to train on: the output itself, its ``loss``, or else the mean square of everything it holds.

    The squares count once, twice and three times in turn: their plain mean is the same for whatever a norm has made, and
    all gradients behind it would be zero, right or wrong.
    """
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named if named.numel() == 1 else named.mean()  # DAC: one per row
    leaves = [leaf for leaf in flatten_tree(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    trained = [leaf for leaf in leaves if leaf.requires_grad or not torch.is_grad_enabled()]
    if not trained:
        raise RunError(
            "Nothing that the model returns depends on its parameters, so there is no gradient.",
            "Return a loss, or floating-point tensors to make one of.",
        )
    wholes = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in trained]
    return torch.stack([(whole.pow(2) * _in_turn(whole)).mean() for whole in wholes]).sum()


def _in_turn(tensor: Tensor) -> Tensor:
    return (torch.arange(tensor.numel(), device=tensor.device) % 3 + 1).view(tensor.shape)


def _copies(found: Gathered, when: str) -> list[Copies]:
    return [
        Copies(what, name + when, spread, rank, size_of(found.tensors.get((what, name))))
        for (what, name), (spread, rank) in found.spreads.items()
    ]


def size_of(tensor: Tensor | None) -> float:
    """The largest finite value."""
    if tensor is None or not tensor.numel():
        return 0.0
    sizes = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    return float(sizes.nan_to_num(0.0, 0.0, 0.0).max())
