"""Mistakes after the backward pass: clipping, optimizers and their state, checkpoints, buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from shardwright.verification.candidates.case import Case, Finding, Hypothesis, listed, multiple
from shardwright.verification.candidates.evidence import EXACT, Holder, theirs_of
from shardwright.verification.candidates.recognising import Numbers, flat


def checkpoint(case: Case) -> Finding | None:
    """What comes back from a checkpoint is another shard, or another step."""
    evidence = case.evidence
    for holder in evidence.holders:
        after = evidence.seen[holder.rank].reloaded
        if after is None or np.array_equal(after[holder.name], holder.held.before[1]):
            continue
        for other in evidence.holders:
            if np.array_equal(after[holder.name], other.held.before[1]):
                return Finding(
                    "shards exchanged by the checkpoint",
                    f"After the checkpoint rank {holder.rank} holds as {holder.name} what rank {other.rank} had saved as "
                    f"{other.name}: look at the order in which shards are saved and loaded.",
                )
        if np.array_equal(after[holder.name], holder.held.before[0]):
            return Finding(
                "checkpoint of an earlier step",
                f"After the checkpoint {holder.name} on rank {holder.rank} is that before step 1: save after the update.",
            )
        return Finding(
            "checkpoint changes weights",
            f"After the checkpoint {holder.name} on rank {holder.rank} holds other numbers than were saved.",
        )
    return None


def clipping(case: Case) -> Finding | None:
    """Gradients are clipped by a norm that is not that of all gradients together, or not at all."""
    evidence, step = case.evidence, case.step
    clip = evidence.seen[0].clip
    wrong = [item for item in case.wrong if "as the update of step" in item.name]
    if not wrong or case.gradients:
        return None
    taken: list[float] = []
    for rank in range(evidence.ranks):
        own = [h for h in evidence.holders if h.rank == rank]
        given = np.concatenate([_numbers(h, "gradients", step) for h in own]) if own else np.zeros(0)
        handed = np.concatenate([_numbers(h, "handed", step) for h in own]) if own else np.zeros(0)
        times = multiple(handed, given) if given.size else None
        taken.append(math.nan if times is None else times)
    if clip is None:
        shown = listed([f"{value:.4g}" for value in taken])
        return Finding(
            "gradients changed before the update",
            f"Updates get {shown} times the gradients (rank by rank) and one process does not clip: say "
            "Candidate(clip=…) if "
            "they are clipped on purpose; otherwise unscale them before the update.",
        )
    norms = [
        float(
            np.linalg.norm(np.concatenate([_numbers(h, "gradients", step) for h in evidence.holders if h.rank == rank]))
        )
        for rank in range(evidence.ranks)
    ]
    whole = float(np.linalg.norm(np.nan_to_num(evidence.row("gradients", step))))
    said = f"the norm of all gradients is {whole:.4g}, they are to be clipped to {clip:g}"

    def fits(expected: list[float]) -> bool:
        return all(abs(a - min(1.0, clip / (b + 1e-6))) <= EXACT for a, b in zip(taken, expected, strict=True))

    if all(abs(value - 1) <= EXACT for value in taken):
        return Finding("not clipped", f"Updates get gradients as they are; {said}.")
    if fits(norms):
        return Finding(
            "clipped by the local norm",
            f"Every rank clips by the norm of its own gradients ({listed([f'{n:.4g}' for n in norms], 4)}); {said}: "
            "add up the squares over the ranks that hold different parts first.",
        )
    if fits([math.sqrt(sum(n * n for n in norms))] * len(norms)):
        return Finding(
            "replicated gradients counted repeatedly in the norm",
            f"The norm that clips is that of all ranks' gradients, {math.sqrt(sum(n * n for n in norms)):.4g}; "
            f"{said}: count what "
            "several ranks hold once.",
        )
    if fits([sum(norms)] * len(norms)):
        return Finding("norms added up without squares", f"The norm that clips is the sum of the ranks' norms; {said}.")
    return Finding(
        "clipped by another norm",
        f"Ranks multiply gradients by {listed([f'{value:.4g}' for value in taken], 4)}; {said}, which is "
        f"{min(1.0, clip / (whole + 1e-6)):.4g}: look at the norm, and at what is clipped twice.",
    )


def _numbers(holder: Holder, kind: str, step: int) -> Numbers:
    found = holder.numbers(kind, step)
    return np.zeros(len(holder.places)) if found is None else found


def update(case: Case) -> Finding | None:
    """The gradients are right and the weights after the update are not."""
    if case.gradients:
        return None
    evidence, step = case.evidence, case.step
    before, after = evidence.row("before", step), evidence.row("before", step + 1)
    expected = _replayed(case, evidence.run.gradients[: step + 1])
    still: list[tuple[int, str]] = []
    wrong: list[Holder] = []
    for holder in evidence.holders:
        had, has = holder.held.before[step][holder.mine], holder.held.before[step + 1][holder.mine]
        should = expected[holder.places]
        if np.abs(has - should).max(initial=0.0) > EXACT * np.abs(should - had).max(initial=0.0):
            wrong.append(holder)
            if np.array_equal(had, has):
                still.append((holder.rank, holder.name))
    if not wrong:
        return None
    if len(still) == len(wrong):
        ranks = sorted({rank for rank, _ in still})
        where = "all ranks" if len(ranks) == evidence.ranks else f"rank {listed(ranks)}"
        names = list(dict.fromkeys(name for _, name in still))
        return Finding(
            "not updated",
            f"{listed(names)} on {where} stay as they are although their gradients are right: the optimizer was "
            "made of other "
            "tensors (before the module was wrapped or sharded?), or lacks them.",
        )
    times = multiple(np.nan_to_num(after - before), np.nan_to_num(expected - before))
    if times is not None:
        return Finding(
            "learning rate scaled",
            f"All updates of step {step + 1} are {times:.6g} times those of one process with the same options: "
            "look at the learning "
            "rate, and at updates that are made more than once.",
        )
    if step:
        fresh = _replayed(case, evidence.run.gradients[step : step + 1])
        if all(_explains(holder, step, fresh) for holder in wrong):
            return Finding(
                "optimizer state lost",
                f"The update of step {step + 1} is that of an optimizer without any state: its moments were lost "
                "(a new optimizer, or "
                "a checkpoint without its state).",
            )
        moved = _moved_state(case, wrong)
        if moved is not None:
            return moved
    names = list(dict.fromkeys(holder.name for holder in wrong))
    ranks = sorted({holder.rank for holder in wrong})
    return Finding(
        "another update",
        f"{listed(names)} on rank {listed(ranks, 4)} are updated otherwise in step {step + 1} than "
        f"{theirs_of(evidence.seen).kind.__name__} "
        "does with the same gradients and options: look at what the optimizer is given, and at its state.",
    )


def _explains(holder: Holder, step: int, row: Numbers) -> bool:
    had, has = holder.held.before[step][holder.mine], holder.held.before[step + 1][holder.mine]
    should = row[holder.places]
    return bool(np.abs(has - should).max(initial=0.0) <= EXACT * np.abs(should - had).max(initial=0.0))


def _moved_state(case: Case, wrong: list[Holder]) -> Finding | None:
    """Whether the state of the steps before is that of the other ranks' shards."""
    evidence, step = case.evidence, case.step
    for holder in wrong:
        for other in evidence.holders:
            same = other.name == holder.name and len(other.held.places) == len(holder.held.places)
            if not same or other.rank == holder.rank:
                continue
            gradients = []
            for past in range(step + 1):
                row = np.nan_to_num(evidence.row("handed", past))
                moved = other.held.handed[past]
                if past < step and moved is not None:
                    row[holder.places] = moved[holder.mine]
                gradients.append(evidence.known.parts(row))
            if _explains(holder, step, _replayed(case, gradients, clipped=True)):
                return Finding(
                    "optimizer state of another shard",
                    f"In step {step + 1} rank {holder.rank} updates {holder.name} with the state of rank "
                    f"{other.rank}'s shard: "
                    "cut the optimizer's state exactly as the weights (when it is made, and when it is loaded).",
                )
    return None


def _replayed(case: Case, gradients: Sequence[Mapping[str, torch.Tensor]], clipped: bool = False) -> Numbers:
    """The weights that one process makes of those before the step, by the last of these gradients and the state that the
    others have left (which does not depend on the weights meanwhile). ``clipped``: the gradients are clipped already."""
    evidence = case.evidence
    theirs = theirs_of(evidence.seen)
    how = (replace(theirs, clip=None) if clipped else theirs).training()
    start = evidence.known.parts(evidence.row("before", case.step))
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    trained = [name for name in parameters if any(name in found for found in gradients)]
    if trained:
        optimizer = how.optimizer({name: parameters[name] for name in trained})
        for step, found in enumerate(gradients, case.step + 1 - len(gradients)):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(start[name])
            for name in trained:
                parameters[name].grad = found[name].clone() if name in found else None
            how.before_update(optimizer, step)
            optimizer.step()
    return evidence.known.row({name: flat(parameter) for name, parameter in parameters.items()})


def buffers(case: Case) -> Finding | None:
    """Only buffers differ."""
    named = [item.name for item in case.wrong if item.what == "buffer"]
    copies = [item.name for item in case.wrong if item.what == "copy" and item.name.startswith("buffer ")]
    if not named and not copies:
        return None
    running = [name for name in (*named, *copies) if "running_" in name]
    if running:
        return Finding(
            "batch-norm statistics local",
            f"{listed(running)}: statistics are those of a rank's own rows: use SyncBatchNorm, or accept another "
            "model than on "
            "one process.",
        )
    return Finding(
        "buffers differ", f"{listed(named or copies)}: look at where the ranks update and broadcast buffers."
    )


def loss_alone(case: Case) -> Finding | None:
    """Gradients are right, and the loss that is returned is another one."""
    if not case.loss or case.gradients:
        return None
    true = case.evidence.one_process(case.step).losses[0]
    times = case.evidence.run.losses[case.step] / true if true else math.nan
    return Finding(
        "loss scaled",
        f"The loss that ranks return is {times:.6g} times that of one process while all gradients are right: it "
        "is divided by or "
        "added up over ranks or micro-batches; say Candidate(losses='sum') where it is a part of a sum.",
    )


UPDATES: tuple[Hypothesis, ...] = (checkpoint, clipping, update, buffers, loss_alone)
