"""Sailor's measured plans (Strati et al., SOSP 2025) predicted from its profiles, by an event simulation of 1F1B,
nothing fitted.

Two facts about how such a pipeline runs go beyond Sailor's own rule. Every tensor-parallel rank sends the whole
boundary tensor over its own network card, so a transfer has the bandwidth of one card, not of all the cards of the
stage. And a transfer occupies both its ends: neither the sender nor the receiver computes meanwhile. The rest is the
rule's: forward and backward seconds per layer of a stage's slowest replica, the slowest pair of replicas' transfers,
the slowest stage's gradient all-reduce in buckets as 2 (d − 1) messages, one layer's update.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from bench.published.reading import between, check
from shardwright.errors import ProblemError
from shardwright.files import read_json, read_text
from shardwright.records import read_record
from shardwright.schedules import one_f_one_b, pipeline, run

BUCKET_BYTES = 5e8
FLOAT_BYTES = 4
MOST_MICROBATCHES, MOST_REPLICAS = 100_000, 10_000
COLUMNS = (
    "id", "model", "stages", "layers_per_stage", "microbatch_size", "microbatches", "measured_seconds",
    "sailor_rule_seconds",
)  # fmt: skip
REPLICA = re.compile(r"(?:(\d{1,5})x)?([A-Za-z0-9-]+):tp(\d{1,4})")

Replica = tuple[str, int]  # kind of its devices, and their number


@dataclass(frozen=True)
class MeasuredPlan:
    """One row: per stage its replicas and its layers."""

    name: str
    model: str
    replicas: tuple[tuple[Replica, ...], ...]
    layers: tuple[int, ...]
    microbatch_size: int
    microbatches: int
    measured_seconds: float
    rule_seconds: float
    doubt: str

    @property
    def mixed(self) -> bool:
        """Whether unlike devices take part."""
        return len({replica for stage in self.replicas for replica in stage}) > 1


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of every layer: a model on one kind of device, micro-batch size and tensor-parallel degree."""

    others_allowed: ClassVar[bool] = True
    model: str
    gpu: str
    microbatch: int
    tp: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]


@dataclass(frozen=True)
class LayerSizes:
    """Floats of every layer's output and parameters, per device of a tensor-parallel group."""

    others_allowed: ClassVar[bool] = True
    act_output_floats: tuple[float, ...]
    params_floats: tuple[float, ...]


@dataclass(frozen=True)
class ModelSizes:
    others_allowed: ClassVar[bool] = True
    per_tp: dict[str, LayerSizes]


@dataclass(frozen=True)
class Profiles:
    """What was profiled; ``network`` has [kind, devices used, kind, devices used, (a, b, c)]."""

    others_allowed: ClassVar[bool] = True
    profiles: tuple[LayerSeconds, ...]
    models: dict[str, ModelSizes]
    network: tuple[tuple[str, int, str, int, tuple[float, float, float]], ...]


def read_plans(path: str | Path) -> tuple[list[MeasuredPlan], list[str]]:
    """The rows of a table of plans, with those that are in doubt; and a sentence for each that cannot be read."""
    plans, refused = [], []
    for number, row in enumerate(csv.DictReader(io.StringIO(read_text(path, ProblemError))), 2):
        try:
            plans.append(_plan(row))
        except (ProblemError, ValueError) as error:
            what = error.message if isinstance(error, ProblemError) else f"{error}."
            refused.append(f"line {number} ({row.get('id') or 'no id'}): {what}")
    return plans, refused


def _plan(row: dict[str, str]) -> MeasuredPlan:
    missing = [key for key in COLUMNS if not row.get(key)]
    check(not missing, f"it has no {', '.join(missing)}")
    stages = tuple(_replicas(stage) for stage in row["stages"].split("|"))
    plan = MeasuredPlan(
        name=row["id"],
        model=row["model"],
        replicas=stages,
        layers=tuple(int(n) for n in row["layers_per_stage"].split()),
        microbatch_size=int(row["microbatch_size"]),
        microbatches=int(row["microbatches"]),
        measured_seconds=float(row["measured_seconds"]),
        rule_seconds=float(row["sailor_rule_seconds"]),
        doubt=row.get("doubt") or "",
    )
    check(len(plan.layers) == len(stages), f"{len(stages)} stages, but the layers of {len(plan.layers)}")
    check(len({len(stage) for stage in stages}) == 1, "stages with unlike numbers of replicas")
    for count in plan.layers:
        between(count, 1, 10_000, "a stage's number of layers")
    between(plan.microbatches, 1, MOST_MICROBATCHES, "microbatches")
    between(plan.microbatch_size, 1, 10**6, "microbatch_size")
    between(plan.measured_seconds, 1e-9, 1e9, "measured_seconds")
    between(plan.rule_seconds, 0, 1e9, "sailor_rule_seconds")
    return plan


def _replicas(text: str) -> tuple[Replica, ...]:
    """``4xGH-96:tp4`` is four equal replicas, ``A:tp2+B:tp2`` two unlike ones."""
    found: list[Replica] = []
    for part in text.split("+"):
        match = REPLICA.fullmatch(part.strip())
        check(match is not None, f"{part.strip()[:60]!r} is no GPU:tpN")
        assert match is not None
        count = int(match[1] or 1)
        between(count, 1, MOST_REPLICAS, "replicas")
        found += [(match[2], int(match[3]))] * count
    return tuple(found)


def read_profiles(path: str | Path) -> Profiles:
    """Seconds per layer, sizes per layer, and the network's bandwidths, as published."""
    return read_record(
        Profiles, read_json(path, ProblemError), where=f"{path} holds no profiles of Sailor's", error=ProblemError,
        remedy="Write them as published.",
    )  # fmt: skip


def predict(plan: MeasuredPlan, profiles: Profiles) -> float:
    """Seconds of one iteration."""
    ends = list(itertools.accumulate(plan.layers))
    spans = [slice(end - count, end) for end, count in zip(ends, plan.layers, strict=True)]
    tables = [[_profile(plan, replica, profiles) for replica in sorted(set(stage))] for stage in plan.replicas]
    sizes = [_sizes(plan, stage, profiles) for stage in plan.replicas]
    if ends[-1] > min(len(table.forward) for stage in tables for table in stage):
        raise ProblemError(f"the plan {plan.name} has {ends[-1]} layers, more than were profiled.", "Leave it out.")
    hops = []
    for stage, end in enumerate(ends[:-1]):
        bytes_ = FLOAT_BYTES * sizes[stage].act_output_floats[end - 1] * plan.microbatch_size
        pairs = set(itertools.product(_kinds(plan.replicas[stage]), _kinds(plan.replicas[stage + 1])))
        hops.append(max(transfer_seconds(bytes_, one, other, profiles) for one, other in pairs))
    borders = [sum(hops[max(0, k - 1) : k + 1]) for k in range(len(spans))]  # of one pass, either way
    whole = list(zip(tables, spans, borders, strict=True))
    timing = run(
        one_f_one_b(len(spans), plan.microbatches),
        pipeline(
            range(len(spans)),
            plan.microbatches,
            forward=[max(sum(table.forward[s]) for table in stage) + h for stage, s, h in whole],
            inputs=[max(sum(table.backward[s]) for table in stage) + h for stage, s, h in whole],
            weights=0.0,
        ),
    )
    sums = [
        _all_reduce(FLOAT_BYTES * sum(size.params_floats[s]), stage, profiles)
        for size, s, stage in zip(sizes, spans, plan.replicas, strict=True)
    ]
    return timing.makespan + max(max(table.update) for stage in tables for table in stage) + max(sums)


def _kinds(stage: tuple[Replica, ...]) -> list[str]:
    return sorted({gpu for gpu, _ in stage})


def _profile(plan: MeasuredPlan, replica: Replica, profiles: Profiles) -> LayerSeconds:
    wanted = (plan.model, replica[0], plan.microbatch_size, replica[1])
    found = next((p for p in profiles.profiles if (p.model, p.gpu, p.microbatch, p.tp) == wanted), None)
    if found is None:
        raise ProblemError(
            f"there is no profile of {plan.model} on {replica[0]} for micro-batch {plan.microbatch_size} and tp "
            f"{replica[1]}.",
            "Profile it, or leave the plan out.",
        )
    return found


def _sizes(plan: MeasuredPlan, stage: tuple[Replica, ...], profiles: Profiles) -> LayerSizes:
    least = str(min(tp for _, tp in stage))
    known = profiles.models[plan.model].per_tp if plan.model in profiles.models else {}
    if least not in known:
        raise ProblemError(f"there are no sizes of {plan.model} for tp {least}.", "Profile it, or leave the plan out.")
    return known[least]


def transfer_seconds(size: float, gpu: str, other: str, profiles: Profiles) -> float:
    """Seconds of one message between two nodes over one card each: the bandwidth is a parabola of the size's
    logarithm.
    """
    ends = (gpu, 1, other, 1)
    fit = next((fit for one, n, two, m, fit in profiles.network if (one, n, two, m) == ends), None)
    if fit is None:
        raise ProblemError(f"there is no bandwidth between {gpu} and {other}.", "Measure it, or leave the plan out.")
    a, b, c = fit
    logarithm = math.log2(max(size, 1.0) / 1e6)
    gigabytes_per_second = a * logarithm**2 + b * logarithm + c
    check(gigabytes_per_second > 0, f"the bandwidth between {gpu} and {other} of {size:.3g} bytes is not positive")
    return size / (gigabytes_per_second * 1e9)


def _all_reduce(size: float, stage: tuple[Replica, ...], profiles: Profiles) -> float:
    data = len(stage)
    if data == 1:
        return 0.0
    pairs = {pair for a, b in itertools.pairwise([*stage, stage[0]]) for pair in ((a[0], b[0]),)}
    full, rest = divmod(size, BUCKET_BYTES)
    check(full < 10**6, "a stage has more parameters than any model")
    buckets = [BUCKET_BYTES] * int(full) + ([rest] if rest else [])
    return sum(2 * (data - 1) * max(transfer_seconds(b / data, *pair, profiles) for pair in pairs) for b in buckets)


def mean_error(plans: list[MeasuredPlan], profiles: Profiles) -> tuple[float, float]:
    """Mean relative error of the simulation and of Sailor's own rule, over the plans that are not in doubt."""
    judged = [plan for plan in plans if not plan.doubt]
    ours = [abs(predict(plan, profiles) / plan.measured_seconds - 1) for plan in judged]
    theirs = [abs(plan.rule_seconds / plan.measured_seconds - 1) for plan in judged]
    return sum(ours) / len(ours), sum(theirs) / len(theirs)
