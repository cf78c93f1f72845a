"""Why do the numbers differ? Known mistakes are tried one after the other: the one that gives these very numbers is named.

A cause is not guessed from a name. Each is a hypothesis about what the ranks computed instead (a multiple of the gradient,
one rank's rows, a sum that was never taken, gradients clipped by another norm), which one process can compute too; it is
named where it reproduces what the ranks have to seven digits and the right computation does not. Only what no
computation settles (where a gradient stops, an all-reduce that is missing on the way back) is read off the pattern, and
said with "probably". What comes first in a step is explained first: weights at the start, dropout, the forward pass,
gradients, updates.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.verification.candidates.case import Case, Finding, step_of
from shardwright.verification.candidates.causes_forward import FORWARD, at_the_start, of_dropout
from shardwright.verification.candidates.causes_gradients import GRADIENTS
from shardwright.verification.candidates.causes_updates import UPDATES
from shardwright.verification.candidates.evidence import Evidence
from shardwright.verification.candidates.modules import outputs
from shardwright.verification.compare import Comparison


def cause(
    evidence: Evidence, found: Sequence[Comparison], dropped: Sequence[tuple[Comparison, tuple[int, int], bool]]
) -> list[Finding]:
    """The first place that differs, and the cause that explains it."""
    wrong = [item for item in found if not item.agrees]
    begun = at_the_start(evidence, wrong)
    if begun is not None:
        return [begun]
    if all(item.what == "stream" for item in wrong):
        return [of_dropout(dropped)]
    step = min((number for item in wrong if (number := step_of(item)) is not None), default=len(evidence.steps))
    if step == len(evidence.steps):
        step = 0  # buffers only, or what is compared at the end
    told = outputs(evidence.model, evidence.steps[0][0], evidence.seen)
    case = Case(evidence, wrong, step, told)
    for hypothesis in (*FORWARD, *GRADIENTS, *UPDATES):
        explained = hypothesis(case)
        if explained is not None:
            return [explained, *_place(case, explained)]
    return _place(case, None)


def _place(case: Case, explained: Finding | None) -> list[Finding]:
    """The first operator or parameter that differs, with its quantity."""
    first = first_difference(case)
    about = f"First difference: {first}."
    if explained is not None:
        return [Finding("", about)]
    strange = next((output for output in case.outputs if not output.held), None)
    if strange is not None and (case.loss or case.step):
        about += f" The first module to return something else is {strange.path or 'the model'}."
    elif case.gradients and not case.loss:
        about += " The loss is right: look at what happens to gradients between the backward pass and this parameter."
    return [Finding("", f"{about} None of the known mistakes gives these numbers.")]


def first_difference(case: Case) -> str:
    """The first thing that is wrong in the first step that is: module, loss, gradient (last parameter first), update."""
    strange = next((output for output in case.outputs if not output.held), None)
    if case.step == 0 and case.loss and strange is not None:
        return f"the output of {strange.path or 'the model'} ({_difference(case, 'loss')} in the loss)"
    order = list(case.evidence.known.spans)
    for what in ("loss", "gradient", "copy", "update", "parameter", "buffer", "stream"):
        items = [item for item in case.wrong if item.what == what and step_of(item) in (case.step, None)]
        if items:
            last_first = sorted(items, key=lambda item: -_index(order, item.name)) if what == "gradient" else items
            item = last_first[0]
            return f"{what} {item.name}, off by {item.difference:.2g} (its size is {item.size:.2g})"
    item = case.wrong[0]
    return f"{item.what} {item.name}, off by {item.difference:.2g} (its size is {item.size:.2g})"


def _difference(case: Case, what: str) -> str:
    item = next(item for item in case.wrong if item.what == what)
    return f"{item.difference:.2g}"


def _index(order: Sequence[str], name: str) -> int:
    return next((n for n, known in enumerate(order) if name.startswith(f"{known} ")), -1)
