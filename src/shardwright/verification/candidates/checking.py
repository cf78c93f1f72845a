"""Does somebody's parallel module train as one process does? Local processes run it, one process judges what they saw.

The same batches, judgement and limits as for plans of our own (:mod:`shardwright.verification.verify`): in float64, losses,
gradients, updates and buffers of every step within 1e-9 of the unmodified model on one process, all copies of what several
ranks hold equal. One process trains with the same kind of optimizer, options and clipping. Two ranks with one tensor must
have dropped alike, two with different ones must not. Where something differs, the first place is named, and the cause where
one explains the numbers (:mod:`~shardwright.verification.candidates.causes`).
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.errors import RunError, ShardwrightError
from shardwright.frontend import capture
from shardwright.runtime.launch import run_locally
from shardwright.verification.batches import Steps, shortened, told, varied
from shardwright.verification.candidates.case import Finding
from shardwright.verification.candidates.causes import cause
from shardwright.verification.candidates.evidence import Evidence, Theirs, theirs_of
from shardwright.verification.candidates.masks import judged_masks
from shardwright.verification.candidates.observing import Asked, Dropouts, Seen, observed
from shardwright.verification.candidates.recognising import NOBODY, distinct
from shardwright.verification.compare import DOUBLE, Comparison, Verification
from shardwright.verification.draws import NUMBERS, Draws, changed_by, skip_nothing, written_down
from shardwright.verification.ignored import with_ignored_labels
from shardwright.verification.judging import judged, truth_of
from shardwright.verification.prepare import Build, all_double, built, default_double, widened

BuildCandidate = Callable[[nn.Module], Any]
STEPS = 3
EARLY_SECONDS = 2.0
"""So long before the time is over, ranks that have not finished say where they stand."""


@dataclass(frozen=True)
class Checked:
    """What was compared, and where it differs: the first place, and the cause, if one explains the numbers."""

    verification: Verification
    findings: tuple[Finding, ...] = ()
    compared: tuple[str, ...] = ()
    processes: int = 1

    @property
    def agrees(self) -> bool:
        return self.verification.agrees

    def as_dict(self) -> dict[str, Any]:
        found = [asdict(finding) for finding in self.findings]
        about = {"agrees": self.agrees, "processes": self.processes, "compared": list(self.compared)}
        details = self.verification.as_dict()
        kept = ("dtype", "losses", "worst", "disagreeing")
        return {**about, "findings": found, "numbers": details["compared"], **{key: details[key] for key in kept}}

    def sentences(self) -> str:
        """What differs and why, line by line."""
        return "\n".join(finding.sentence for finding in self.findings)


@dataclass(frozen=True)
class Question:
    """A model with distinct numbers in float64 and the batches of every step, alike in every process."""

    model: nn.Module
    steps: Steps
    drops: bool
    notes: tuple[str, ...]


def check_candidate(
    build: Build,
    candidate: BuildCandidate,
    *,
    processes: int = 4,
    steps: int = STEPS,
    seconds: float = 300.0,
    uneven_labels: bool = True,
) -> Checked:
    """Run somebody's parallel module on local processes and compare it with one process.

    Parameters
    ----------
    build
        A picklable function that gives ``(model, args, kwargs)``, called with a fixed seed.
    candidate
        A picklable function that makes the parallel module of the model on every rank: ``candidate(model)`` gives a module
        or a :class:`~shardwright.verification.candidates.protocol.Candidate`.
    uneven_labels
        Whether some labels of a cross entropy become ignored ones, unevenly, where the batch has none: ranks that average
        over their own labels give other gradients then.
    seconds
        After which ranks that still wait for each other are ended, and where they stand is told.

    Examples
    --------
    >>> check_candidate(build_model, their_build, processes=4).agrees                        # doctest: +SKIP
    True
    """
    question = asked_of(build, steps, uneven_labels)
    batches = pickle.dumps(question.steps)
    with tempfile.TemporaryDirectory(prefix="shardwright-check-") as folder:
        given = (build, candidate, batches, question.drops, folder, max(1.0, seconds - EARLY_SECONDS))
        try:
            seen = run_locally(observe_rank, processes, *given, seconds=seconds)
        except RunError as error:
            stands = {int(path.name): path.read_text() for path in sorted(Path(folder).iterdir())}
            if "have not finished" not in error.message or not stands:
                raise
            where = "; ".join(f"rank {rank} {text}" for rank, text in sorted(stands.items()))
            raise RunError(
                f"After {seconds:.0f} s ranks {list(stands)} had not finished: {where}.",
                "Ranks that wait for each other have usually called different collectives; or allow more by --seconds.",
            ) from None
    return judged_ranks(question, seen)


def asked_of(build: Build, steps: int, uneven_labels: bool = True) -> Question:
    """The model and its batches; what the model would draw at random is switched off or refused."""
    model, args, kwargs = built(build)
    model = prepared(model)
    with all_double():
        _, args, kwargs = widened(model, args, kwargs)
        draws = written_down(model, args, kwargs)
        others = [text for text in changed_by(draws) if text.startswith(NUMBERS)]
        if others:
            raise RunError(
                f"The model draws random numbers itself ({others[0]}), so that two runs of it cannot be compared.",
                "Give a model whose only random numbers are dropout's, or pass the others in as inputs.",
            )
        graph = None
        with suppress(ShardwrightError), Dropouts(on=False):  # what cannot be captured is compared on plainer batches
            graph = capture(copy.deepcopy(model), args, kwargs)
    labels = ""
    if graph is not None and uneven_labels:
        args, kwargs, labels = with_ignored_labels(graph, args, kwargs)
    with all_double(), Dropouts(on=False):
        batches = shortened(varied(model, graph, args, kwargs, steps), "one")
    notes = (told(batches), *([labels] if labels else []))
    return Question(model, batches, bool(draws.values), notes)


def prepared(model: nn.Module) -> nn.Module:
    """The model in float64 with distinct numbers."""
    if any(parameter.is_complex() for parameter in model.parameters()):
        raise RunError("The model has complex parameters.", "Give one with real parameters.")
    for module in model.modules():
        skip_nothing(module, Draws())
    with default_double():
        return distinct(widened(model, (), {})[0])


def observe_rank(
    build: Build,
    candidate: BuildCandidate,
    batches: bytes,
    drops: bool,
    folder: str | None = None,
    seconds: float = 0.0,
) -> Seen:
    """What :func:`check_candidate` runs on every rank of a process group."""
    model = prepared(built(build)[0])
    return observed(model, Asked(candidate, pickle.loads(batches), drops, folder, seconds))


def judged_ranks(question: Question, seen: Sequence[Seen]) -> Checked:
    """All ranks' runs against one process, and what explains a difference."""
    evidence = Evidence(question.model, question.steps, seen)
    found = list(_at_the_start(evidence))
    dropped = []
    if all(item.agrees for item in found if not item.name.endswith(ORDER)):
        how = theirs_of(seen).training()
        with Dropouts(on=False), default_double():
            truth = truth_of(question.model, question.steps, how)
            _forget_zeros(evidence, truth.gradients)
            found += judged(question.model, question.steps, evidence.run, truth, inputs=False, how=how)
        found += _handed(evidence, theirs_of(seen))
        found += _reloaded(evidence)
        dropped = list(judged_masks(seen))
        found += [item for item, _, _ in dropped]
    verification = Verification(tuple(found), tuple(evidence.run.losses), "float64", name="candidate")
    findings = () if verification.agrees else cause(evidence, found, dropped)
    notes = dict.fromkeys(note for rank in seen for note in rank.notes)
    return Checked(verification, tuple(findings), (*question.notes, *notes), len(seen))


ORDER = "in its order"


def _at_the_start(evidence: Evidence) -> list[Comparison]:
    """Whether the ranks began with the numbers of the model, all of them, shards in the order that they say."""
    found = []
    for rank in evidence.seen:
        for name, held in rank.held.items():
            strange = int(((held.places == NOBODY) & (held.before[0] != 0)).sum())
            if strange:
                about = f"{name} on rank {rank.rank}: numbers that the model does not have"
                found.append(Comparison("parameter", about, float(strange), float(len(held.places)), 0.0))
            if held.whole_is is False:
                found.append(Comparison("parameter", f"{name} on rank {rank.rank} {ORDER}", 1.0, 1.0, 0.0))
    missing = np.isnan(evidence.row("before", 0))
    for name, span in evidence.known.spans.items():
        lost = int(missing[span].sum())
        if lost:
            about = f"{name}: numbers that no rank holds"
            found.append(Comparison("parameter", about, float(lost), float(span.stop - span.start), 0.0))
    return found


def _forget_zeros(evidence: Evidence, true: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Wrappers give a gradient of zero to what a loss does not depend on, one process none."""
    for step, gradients in enumerate(evidence.run.gradients):
        for name in [name for name in gradients if name not in true[step] and not bool(gradients[name].any())]:
            del gradients[name]


def _handed(evidence: Evidence, how: Theirs) -> list[Comparison]:
    """Whether every update was given the step's gradients, clipped as one process clips them."""
    found = []
    for step in range(len(evidence.steps)):
        norm = float(np.linalg.norm(np.nan_to_num(evidence.row("gradients", step))))
        share = 1.0 if how.clip is None else min(1.0, how.clip / (norm + 1e-6))
        for rank in evidence.seen:
            worst, size = 0.0, 0.0
            for held in rank.held.values():
                given, handed = held.gradients[step], held.handed[step]
                if given is not None and handed is not None and len(given):
                    worst = max(worst, float(np.abs(handed - share * given).max()))
                    size = max(size, float(np.abs(share * given).max()))
            name = f"gradients as the update of step {step + 1} got them, rank {rank.rank}"
            found.append(Comparison("update", name, worst, size, DOUBLE * size))
    return found


def _reloaded(evidence: Evidence) -> list[Comparison]:
    """Whether a checkpoint gives back what was saved."""
    found = []
    for holder in evidence.holders:
        after = evidence.seen[holder.rank].reloaded
        if after is not None:
            saved = holder.held.before[1]
            difference = float(np.abs(after[holder.name] - saved).max(initial=0.0))
            about = f"{holder.name} after the checkpoint, rank {holder.rank}"
            found.append(Comparison("parameter", about, difference, float(np.abs(saved).max(initial=0.0)), 0.0))
    return found
