"""``shardwright ops --check``: every rule of every operator, run.

Each sample call of each operator is cut along each of its loops into 2, 3 and 4 pieces, and along pairs of loops into
2 x 2, with sizes that divide and sizes that do not, forward and backward, in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import ShardwrightError
from shardwright.operators.checking import Disagreement, check, one_thread, ranks_of
from shardwright.operators.deriving import FAILED, derived
from shardwright.operators.extending import operator_target
from shardwright.operators.rules import OpRules
from shardwright.verification.samples import EVEN, UNEVEN, Sample, calls, concrete, elementwise_targets, sampled


@dataclass(frozen=True)
class Audit:
    """What was checked, and the first disagreement if there was one."""

    operators: int
    calls: int
    rules: int
    runs: int
    disagreement: Disagreement | None = None


def cuts_of(rules: OpRules, pieces: Sequence[int], pairs: bool) -> Iterator[list[tuple[str, int]]]:
    """Every loop alone in every number of pieces; neighbouring loops together, and each loop cut twice."""
    for loop in rules.loops:
        for count in pieces if loop.divides else pieces[:1]:
            yield [(loop.name, count)]
        if pairs and loop.divides and not loop.windowed:
            yield [(loop.name, 2), (loop.name, 2)]
    if pairs:
        for first, second in zip(rules.loops, rules.loops[1:], strict=False):
            yield [(first.name, 2), (second.name, 2)]


def targets_with_samples(names: Sequence[str] = ()) -> list[str]:
    """Operators that can be checked; ``names`` restricts them to those that contain one of the words."""
    every = sampled() | set(elementwise_targets())
    found = sorted(t for t in every if not names or any(name in t for name in names))
    if not found:
        raise ShardwrightError(
            f"No operator matches {', '.join(map(repr, names))}.", "`shardwright ops` lists those that are described."
        )
    return found


def samples_of(target: str, sizes: Iterable[tuple[int, ...]] = (EVEN, UNEVEN)) -> Iterator[Sample]:
    for choice in sizes:
        yield from calls(target, choice)


def audit_sample(sample: Sample, pieces: Sequence[int] = (2, 3, 4), pairs: bool = True) -> Audit:
    """Check one call of an operator along all its loops."""
    rules = derived(sample.op, sample.tensors)
    if rules.reason.startswith(FAILED):
        shapes = tuple(tuple(x.shape) for x in sample.inputs)
        return Audit(1, 1, 0, 0, Disagreement(sample.op.target, (), shapes, rules.reason))
    if rules.kind == "random":
        return Audit(1, 1, 0, 0)  # two draws cannot be compared
    runs = 0
    for cuts in cuts_of(rules, pieces, pairs):
        if ranks_of(rules, cuts) is None:
            continue
        runs += 1
        found = check(sample.op, sample.tensors, sample.inputs, cuts, rules)
        if found is not None:
            return Audit(1, 1, len(rules.loops), runs, found)
    return Audit(1, 1, len(rules.loops), runs)


def audit_call(operator: str, *arguments: Any, pieces: Sequence[int] = (2, 3, 4)) -> Audit:
    """Check the rules of one operator, yours for example, on one call; keywords come last, as a dict.

    >>> audit_call("mylib::myop", torch.randn(8, 12), 3).disagreement is None     # doctest: +SKIP
    True
    """
    return audit_sample(concrete(operator_target(operator), arguments), pieces)


def audit(
    names: Sequence[str] = (),
    pieces: Sequence[int] = (2, 3, 4),
    sizes: Sequence[tuple[int, ...]] = (EVEN, UNEVEN),
    pairs: bool = True,
    progress: bool = False,
) -> Audit:
    """Check every rule of every operator; stops at the first disagreement.

    >>> audit(["aten.bmm"], pieces=(2,)).disagreement is None
    True
    """
    targets = targets_with_samples(names)
    operators = number = rules = runs = 0
    for target in _shown(targets) if progress else targets:
        operators += 1
        for sample in samples_of(target, sizes):
            with one_thread():
                one = audit_sample(sample, pieces, pairs)
            number, rules, runs = number + 1, rules + one.rules, runs + one.runs
            if one.disagreement is not None:
                return Audit(operators, number, rules, runs, one.disagreement)
    return Audit(operators, number, rules, runs)


def _shown(targets: Sequence[str]) -> Iterable[str]:
    from rich.progress import track

    return track(targets, description="checking")
