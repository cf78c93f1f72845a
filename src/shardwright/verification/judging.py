"""One run against one process that trains the unmodified model: the truth, the yardstick, and the verdict on every number.

The process is given what the run was given: the same batches in the same steps and, where a model draws random numbers,
those that the run drew.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright._torch_compat import map_tree
from shardwright.errors import RunError
from shardwright.frontend.guards import one_process
from shardwright.verification.batches import Batch, Steps
from shardwright.verification.compare import TIMES, Comparison, compare
from shardwright.verification.decisions import Decisions, Jump, Question, jumps
from shardwright.verification.gathering import distance
from shardwright.verification.kinks import beside_kinks, drawn_again, from_its_own_side
from shardwright.verification.prepare import all_double, widened
from shardwright.verification.recorded import LOSS_SCALE, OURS, Run, Training, retraced, train

Tensors = Mapping[str, Tensor]


def truth_of(model: torch.nn.Module, steps: Steps, how: Training = OURS) -> Run:
    """The unmodified model trained on this process in float64; the model itself stays as it is."""
    twin, own = twin_of(model, steps, wide=True)
    with all_double(), one_process():
        return train(twin, own, keep=True, how=how)


def judged(
    model: torch.nn.Module,
    steps: Steps,
    run: Run,
    truth: Run | None = None,
    inputs: bool = True,
    how: Training = OURS,
) -> list[Comparison]:
    """A run from the weights of ``model`` against the model on this process, in the run's precision.

    ``truth`` saves the run on one process; of a run that drew random numbers only its own truth counts. ``inputs``: whether
    the run gives the gradients of its inputs.
    """
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    steps = [
        [batch._replace(draws=draws) if draws else batch for batch, draws in zip(batches, drawn, strict=True)]
        for batches, drawn in zip(steps, run.draws, strict=True)
    ]
    if dtype_of(model) == torch.float64:
        drawn = any(batch.draws is not None for batches in steps for batch in batches)
        truth = truth if truth is not None and not drawn else truth_of(model, steps, how)
        _finite(truth)
        whole = compare(_as_asked(truth, run, inputs), run, start, how=how)
        if all(item.agrees for item in whole):
            return whole
        # AdamW may have made steps of rounding: then every step is judged from where the run began it, as strictly.
        along, _ = _traced(model, steps, run, wide=True, scale=how.scale)
        stepwise = compare(_as_asked(along, run, inputs), run, start, how=how)
        return stepwise if all(item.agrees for item in stepwise) else whole

    def gradients_at(step: int, parameters: Tensors, turned: Sequence[Jump]) -> Tensors:
        with all_double(), one_process(), Decisions(turned):
            twin, (own,) = twin_of(model, steps[step : step + 1], wide=True)
            return retraced(twin, own, parameters).gradients[0]

    def alone(steps: Steps, path: Run) -> tuple[Run, Run, list[list[Jump]]]:
        """The truth along a run's parameters, one process in the model's precision, and the answers it leaves open."""
        one, rounded = _traced(model, steps, path, wide=False)
        truth, exact = _traced(model, steps, path, wide=True)
        answers = [jumps(true, other, TIMES) for true, other in zip(exact, rounded, strict=True)]
        return truth, one, answers

    def errors_at(step: int, parameters: Tensors) -> dict[str, float]:
        truth, one, answers = alone(steps[step : step + 1], Run(before=[dict(parameters)]))
        one = from_its_own_side(one, truth, answers, lambda _, *given: gradients_at(step, *given))
        return {name: distance(truth.gradients[0].get(name), own) for name, own in one.gradients[0].items()}

    truth, one, answers = alone(steps, run)
    one = from_its_own_side(one, truth, answers, gradients_at)
    _finite(truth)
    truth, one = _as_asked(truth, run, inputs), _as_asked(one, run, inputs)
    found = drawn_again(compare(truth, run, start, one), run, errors_at)
    return beside_kinks(found, run, answers, gradients_at)


def _as_asked(truth: Run, run: Run, inputs: bool) -> Run:
    """What of the truth a run can be held to: with the gradients of inputs or without, with outputs where it gives any."""
    if not inputs:
        kept = [{name: x for name, x in step.items() if not name.startswith("input ")} for step in truth.gradients]
        truth = replace(truth, gradients=kept)
    return truth if any(run.outputs) else replace(truth, outputs=[{} for _ in truth.outputs])


def _finite(truth: Run) -> None:
    for step, loss in enumerate(truth.losses, 1):
        if not math.isfinite(loss):
            raise RunError(
                f"The loss of step {step} is {loss} on one process in float64, so that nothing can be compared.",
                "Give a model and a batch that one process can train on, or fewer steps.",
            )


def _traced(
    model: torch.nn.Module, steps: Steps, run: Run, wide: bool, scale: float = LOSS_SCALE
) -> tuple[Run, list[list[Question]]]:
    """The model on this process where every step starts from the parameters of ``run``, and what it decided per step."""
    twin, own = twin_of(model, steps, wide)
    found, asked = Run(before=run.before, parameters=run.parameters), []
    for number, before in enumerate(run.before):
        with all_double(wide), one_process(), Decisions() as decisions:
            last = number + 1 == len(run.before)
            step = retraced(twin, own[number], before, inputs=last, scale=scale)
        asked.append(decisions.questions)
        found.losses += step.losses
        found.outputs += step.outputs
        found.gradients += step.gradients
        found.buffers = step.buffers
    return found, asked


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """That of its first parameter, of complex numbers that of their parts."""
    return next((p.dtype.to_real() for p in model.parameters()), torch.float32)


def twin_of(model: torch.nn.Module, steps: Steps, wide: bool) -> tuple[torch.nn.Module, Steps]:
    """Copies of a model and its batches, in float64 if ``wide``."""
    twin = copy.deepcopy(model)

    def own(batch: Batch) -> Batch:
        args, kwargs = map_tree(_cloned, (tuple(batch.args), dict(batch.kwargs)))
        if wide:
            _, args, kwargs = widened(twin, args, kwargs)
        return Batch(args, kwargs, batch.draws)

    return twin.double() if wide else twin, [[own(batch) for batch in batches] for batches in steps]


def _cloned(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
