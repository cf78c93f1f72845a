"""What a hypothesis about a mistake is given, and what it answers with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.verification.candidates.evidence import EXACT, Evidence
from shardwright.verification.candidates.modules import Output
from shardwright.verification.candidates.protocol import batch_size
from shardwright.verification.candidates.recognising import Numbers
from shardwright.verification.compare import Comparison


@dataclass(frozen=True)
class Finding:
    """One sentence: the quantity, where, what to look at. ``cause`` is the mistake's short name, "" where none
    explains it."""

    cause: str
    sentence: str


@dataclass(frozen=True)
class Case:
    """What a hypothesis is given: the evidence, what differs, and at which step (counted from zero) it begins."""

    evidence: Evidence
    wrong: Sequence[Comparison]
    step: int
    outputs: Sequence[Output]

    def of(self, what: str) -> list[str]:
        """The names of what differs in this step, of one kind."""
        end = f" at step {self.step + 1}"
        return [item.name.removesuffix(end) for item in self.wrong if item.what == what and item.name.endswith(end)]

    @property
    def gradients(self) -> list[str]:
        """The parameters whose gradients differ, or whose copies of it do, in the model's order."""
        end = f" at step {self.step + 1}"
        copies = [i.name for i in self.wrong if i.what == "copy" and i.name.startswith("gradient ") and end in i.name]
        named = {*self.of("gradient"), *(name.removeprefix("gradient ").partition(end)[0] for name in copies)}
        return [name for name in self.evidence.known.spans if name in named]

    @property
    def loss(self) -> bool:
        return any(item.what == "loss" and item.name == f"step {self.step + 1}" for item in self.wrong)


Hypothesis = Callable[[Case], "Finding | None"]


def step_of(item: Comparison) -> int | None:
    """The step that a comparison is about, counted from zero."""
    words = item.name.replace(",", " ").split()
    if "step" in words and "before" not in words and words[-1] != "step":
        return int(words[words.index("step") + 1]) - 1
    return 1 if "checkpoint" in item.name else None


def listed(names: Sequence[Any], most: int = 3) -> str:
    """Names for a sentence.

    >>> listed(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    shown = ", ".join(str(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def divides(case: Case, count: int) -> bool:
    """Whether the rows of the batch make so many equal parts."""
    batch = case.evidence.steps[case.step][0]
    return batch_size(batch.args, batch.kwargs) % count == 0


def multiple(theirs: Numbers, hypothesis: Numbers) -> float | None:
    """The factor between two rows of numbers, where there is one."""
    square = float(hypothesis @ hypothesis)
    if not square:
        return None
    factor = float(theirs @ hypothesis) / square
    if not factor or np.abs(theirs - factor * hypothesis).max() > EXACT * abs(factor) * np.abs(hypothesis).max():
        return None
    return factor
