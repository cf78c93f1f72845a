"""Mistakes between the loss and the update: factors, sums that were never taken, micro-batches that were lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwright._torch_compat import map_tree
from shardwright.verification.batches import Batch
from shardwright.verification.candidates.case import Case, Finding, Hypothesis, divides, listed, multiple
from shardwright.verification.candidates.evidence import EXACT
from shardwright.verification.candidates.protocol import batch_size
from shardwright.verification.candidates.recognising import Numbers

SCALES = 8.0
"""Powers of two from here on are loss scales, where they are neither ranks nor micro-batches."""
NOISE = 1e-9
"""Gradients that are zero in theory are smaller than this share of the largest."""
FEW_PARTS = 4
"""Of so many micro-batches every pair is tried for one that stands in another's place."""


def right(case: Case) -> Numbers:
    """The gradients of one process in this step, in the model's places."""
    return case.evidence.gradient(case.evidence.one_process(case.step))


def factor(case: Case) -> Finding | None:
    """Gradients are a multiple of the right ones: all of them, or those of some parameters."""
    if not case.gradients:
        return None
    evidence = case.evidence
    theirs, true = evidence.row("gradients", case.step), right(case)
    if np.isnan(theirs).any() or any(
        True for n, s, _ in evidence.apart("gradients", case.step) if s > EXACT * _size(case, theirs, n)
    ):
        return None
    found: dict[float, list[str]] = {}
    for name in case.gradients:
        span = evidence.known.spans[name]
        times = multiple(theirs[span], true[span])
        if times is None:
            return None
        near = next((known for known in found if abs(known - times) < EXACT * abs(known)), times)
        found.setdefault(near, []).append(name)
    if len(found) != 1:
        return None
    times, names = next(iter(found.items()))
    least = NOISE * float(np.abs(true).max())
    trained = [name for name, span in evidence.known.spans.items() if np.abs(true[span]).max(initial=0.0) > least]
    return _all_times(case, times) if set(names) >= set(trained) else _some_times(case, times, names)


def _all_times(case: Case, times: float) -> Finding:
    evidence = case.evidence
    parts, calls, tensor = evidence.parts, evidence.calls, evidence.ranks // evidence.parts
    said = f"All gradients are {times:.6g} times those of one process"
    averaged = any(rank.averages for rank in evidence.seen)
    causes = [
        (calls > 1 and _is(times, calls), "accumulation not divided",
         f"{said}, and there are {calls} micro-batches: divide each loss by their number."),
        (calls > 1 and _is(times, 1 / calls), "accumulation divided twice",
         f"{said}, and there are {calls} micro-batches: their losses are divided twice."),
        (parts > 1 and _is(times, parts), "summed over data-parallel ranks",
         f"{said}, and there are {parts} data-parallel ranks: average their gradients, do not add them up."),
        (parts > 1 and _is(times, 1 / parts), "averaged once too often",
         f"{said}, and there are {parts} data-parallel ranks: the loss is that of the whole batch already, or gradients are "
         "averaged twice."),
        (parts > 1 and calls > 1 and _is(times, parts * calls), "summed over data-parallel ranks and micro-batches",
         f"{said}: {parts} data-parallel ranks times {calls} micro-batches; average over both."),
        (tensor > 1 and _is(times, tensor), "summed over tensor-parallel ranks",
         f"{said}, and {tensor} ranks work on the same rows: a loss that all of them have is counted on each, or a sum over "
         "ranks is taken of what is whole already."),
        (tensor > 1 and _is(times, 1 / tensor), "averaged over tensor-parallel ranks",
         f"{said}, and {tensor} ranks work on the same rows: gradients are averaged over ranks that hold parts of a sum."),
        ((times >= SCALES and math.log2(times).is_integer()) or (_is(math.log2(abs(times)), round(math.log2(abs(times))))
         and abs(times) >= SCALES), "loss scale not taken back",
         f"{said}: divide gradients by the loss scale before the update (scaler.unscale_)."),
    ]  # fmt: skip
    fitting = [(name, sentence) for fits, name, sentence in causes if fits]
    if averaged and len(fitting) > 1:  # that module averages by itself
        fitting = [found for found in fitting if "data-parallel" not in found[0]] or fitting
    if not fitting:
        return Finding(
            "gradients scaled", f"{said}: look for a loss that is scaled and gradients that are not scaled back."
        )
    return Finding(*fitting[0])


def _some_times(case: Case, times: float, names: list[str]) -> Finding:
    copies = len(case.evidence.held_by(names[0]))
    said = f"The gradients of {listed(names)} are {times:.6g} times those of one process, all others are right"
    if copies > 1 and times > 1:
        return Finding(
            "reduced once too often",
            f"{said}: {copies} ranks hold whole copies, whose gradients are added up although each is whole already.",
        )
    return Finding("some gradients scaled", f"{said}: look at how they are reduced over their group of ranks.")


def _is(value: float, expected: float) -> bool:
    return abs(value - expected) <= EXACT * max(abs(expected), 1.0)


def _size(case: Case, row: Numbers, name: str) -> float:
    return float(np.nan_to_num(np.abs(row[case.evidence.known.spans[name]])).max(initial=0.0))


def sum_not_taken(case: Case) -> Finding | None:
    """Every copy of a parameter has a part of the gradient: their sum, or their mean, is right, for all that is wrong."""
    return _copies_apart(case, all_of_them=True)


def some_sums_not_taken(case: Case) -> Finding | None:
    """The same of some parameters, where others are wrong for another reason."""
    return _copies_apart(case, all_of_them=False)


def _copies_apart(case: Case, all_of_them: bool) -> Finding | None:
    evidence, true = case.evidence, right(case)
    apart = {n for n, s, _ in evidence.apart("gradients", case.step) if s > EXACT * _size(case, true, n)}
    total = evidence.added(lambda holder: holder.numbers("gradients", case.step))
    kinds: dict[str, list[str]] = {"sum": [], "mean": []}
    for name in case.gradients:
        span = evidence.known.spans[name]
        times = multiple(total[span], true[span])
        if times is not None and name in apart:
            kinds["mean" if _is(times, float(evidence.copies[span].max())) else "sum"].append(name)
        elif all_of_them:
            return None
    if kinds["sum"]:
        return _sum_not_taken(case, kinds["sum"])
    if kinds["mean"]:
        holders, names = len(evidence.held_by(kinds["mean"][0])), listed(kinds["mean"])
        return Finding(
            "gradients not averaged over ranks",
            f"Each of {holders} ranks keeps the gradient of its own rows for {names}, and their mean is right: "
            "average gradients "
            "over the data-parallel ranks before the update (and leave no_sync() for the last micro-batch).",
        )
    return None


def _sum_not_taken(case: Case, names: list[str]) -> Finding:
    evidence = case.evidence
    tied = [
        name
        for name in names
        if len(evidence.names_of(name)) > 1
        and len({_last(n) for n in evidence.names_of(name)}) > 0
        and _are_different(evidence.names_of(name))
    ]
    if tied:
        held = " and ".join(evidence.names_of(tied[0])[:2])
        return Finding(
            "tied weights not added up",
            f"{tied[0]} is held twice, as {held}, and each copy has a part of its gradient, whose sum is right: "
            "all-reduce the gradients of tied weights over the ranks that hold them.",
        )
    cut = [name for name in names if _cut_by_positions(case, name)]
    if cut:
        return Finding(
            "sequence-parallel gradients not added up",
            f"Each rank has the gradient of its own positions for {listed(names)}, whose sum is right: "
            "all-reduce the gradients "
            "of weights that are replicated while the sequence is cut (norms, biases) over the tensor-parallel ranks.",
        )
    return Finding(
        "replicated gradients not added up",
        f"Each copy of {listed(names)} has a part of its gradient, whose sum is right: all-reduce it over the "
        "ranks that hold "
        "the weight and work on different parts.",
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _are_different(names: list[str]) -> bool:
    """Whether tensors are called differently beyond the numbers of stages and layers."""
    return len({"".join(c for c in name if not c.isdigit()) for name in names}) > 1


def _cut_by_positions(case: Case, name: str) -> bool:
    path = name.rpartition(".")[0]
    output = next((output for output in case.outputs if output.path == path), None)
    extents = [rank.extents[path] for rank in case.evidence.seen if path in rank.extents and rank.rows[1] == 1]
    return output is not None and output.held == "part" and len(extents) > 1


def not_cleared(case: Case) -> Finding | None:
    """The gradients of the step before are still there."""
    if not case.gradients or not case.step:
        return None
    theirs, before = case.evidence.row("gradients", case.step), case.evidence.row("gradients", case.step - 1)
    more = np.nan_to_num(theirs) - right(case)
    times = multiple(more, np.nan_to_num(before))
    if times is None:
        return None
    return Finding(
        "gradients not cleared",
        f"The gradients of step {case.step + 1} are the right ones plus {times:.4g} times those of step {case.step}: "
        "call zero_grad() before every backward pass of a new step.",
    )


def other_rows(case: Case) -> Finding | None:
    """Some rows are used twice, or only some: stale or lost micro-batches, ranks that read the same rows."""
    evidence = case.evidence
    if not (case.gradients or case.loss):
        return None
    theirs = np.nan_to_num(evidence.row("gradients", case.step))
    for who, ranks, parts in (
        ("data-parallel rank", 1, evidence.parts),
        ("micro-batch", evidence.parts, evidence.calls),
    ):
        if parts < 2 or not divides(case, ranks * parts):
            continue
        for which in range(parts):
            run = evidence.one_process(case.step, _rows(case, ranks, parts, [which]))
            times = multiple(theirs, evidence.gradient(run))
            if (
                times is not None and (ranks > 1 or evidence.parts == 1) and case.loss
            ):  # lost gradients leave the loss right
                return _stale(who, parts, which)
            if times is not None:
                lost = "every rank reads the same rows, or the gradients of the others are lost"
                again = "those of the others are lost (cleared in between, or overwritten)"
                return Finding(
                    "same rows on every rank" if ranks == 1 else "micro-batches lost",
                    f"Gradients are {times:.4g} times those of {who} {which + 1} of {parts} alone: "
                    f"{lost if who == 'data-parallel rank' else again}.",
                )
        for into, other in _pairs(parts):
            order = [other if n == into else n for n in range(parts)]
            run = evidence.one_process(case.step, _rows(case, ranks, parts, order))
            if multiple(theirs, evidence.gradient(run)) is not None:
                return _stale(who, parts, other, into)
    return None


def _stale(who: str, parts: int, other: int, into: int | None = None) -> Finding:
    instead = f"whose {who} {into + 1} of {parts} is" if into is not None else f"all of whose {parts} parts are"
    return Finding(
        "stale micro-batch" if who == "micro-batch" else "same rows on two ranks",
        f"Gradients are those of a batch {instead} {who} {other + 1} once more: look for a buffer that is used "
        "before the next one "
        "has arrived, or an index that stays.",
    )


def _pairs(count: int) -> list[tuple[int, int]]:
    if count > FEW_PARTS:
        return [(n, n - 1) for n in range(1, count)]
    return [(n, m) for n in range(count) for m in range(count) if n != m]


def _rows(case: Case, ranks: int, parts: int, order: Sequence[int]) -> Batch:
    """The step's batch, where the rows of each of so many ranks are these of their parts."""
    batch = case.evidence.steps[case.step][0]
    size = batch_size(batch.args, batch.kwargs)

    def chosen(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != size:
            return leaf
        pieces = [own.chunk(parts) for own in leaf.chunk(ranks)]
        return torch.cat([own[number] for own in pieces for number in order])

    return Batch(*map_tree(chosen, (tuple(batch.args), dict(batch.kwargs))))


def no_gradient(case: Case) -> Finding | None:
    """Nothing comes back to some parameters."""
    theirs, true = case.evidence.row("gradients", case.step), right(case)
    spans = case.evidence.known.spans
    lost = [
        name
        for name in case.gradients
        if not np.nan_to_num(theirs[spans[name]]).any() and np.abs(true[spans[name]]).max(initial=0.0) > 0
    ]
    if not lost or case.loss:
        return None
    return Finding(
        "no gradient comes back",
        f"{listed(lost)} get no gradient: something after them is cut off (dist.all_gather and dist.recv have no backward "
        "pass; use torch.distributed.nn.functional or send the gradient back by hand), or they are frozen.",
    )


def backward_sum_missing(case: Case) -> Finding | None:
    """The forward pass is right, and gradients are wrong up to a point behind which all are right: of the pattern."""
    if case.loss or case.step or not case.gradients:
        return None
    evidence, wrong = case.evidence, set(case.gradients)
    apart = {n for n, s, _ in evidence.apart("gradients", case.step) if s > EXACT * _size(case, right(case), n)}
    if not wrong & apart:
        return None
    order = [output.path for output in case.outputs]
    owners = {name: name.rpartition(".")[0] for name in evidence.known.spans}
    last = max((order.index(owners[name]) for name in wrong if owners[name] in order), default=-1)
    cut = [
        name
        for name in evidence.known.spans
        if name not in wrong
        and owners[name] in order
        and order.index(owners[name]) > last
        and len({len(h.places) for h in evidence.held_by(name)} | {0}) > 1
        and evidence.copies[evidence.known.spans[name]].max() < evidence.ranks
    ]
    if not cut or last < 0:
        return None
    first = min(cut, key=lambda name: order.index(owners[name]))
    return Finding(
        "backward sum missing",
        f"The forward pass is right, gradients up to {order[last]} are not, and those of {first} and after it "
        "are: probably the "
        f"gradient of the input of {owners[first]}, of which each rank has a part, is not added up over the tensor-parallel "
        "ranks on the way back.",
    )


GRADIENTS: tuple[Hypothesis, ...] = (
    factor,
    sum_not_taken,
    not_cleared,
    other_rows,
    no_gradient,
    backward_sum_missing,
    some_sums_not_taken,
)
