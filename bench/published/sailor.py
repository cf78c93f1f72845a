"""Sailor's measured plans (Strati et al., SOSP 2025) predicted from its profiles, by an event simulation of 1F1B,
nothing fitted.

Two facts about how such a pipeline runs go beyond Sailor's own rule. Every tensor-parallel rank sends the whole
boundary tensor over its own network card, so a transfer has the bandwidth of one card, not of all the cards of the
stage. And a transfer occupies both its ends: neither the sender nor the receiver computes meanwhile. The rest is the
rule's: forward and backward seconds per layer, the slowest stage's gradient all-reduce in buckets as 2 (d − 1)
messages, one layer's update.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.errors import ProblemError
from shardwright.schedules import one_f_one_b, pipeline, run

BUCKET_BYTES = 5e8
FLOAT_BYTES = 4


@dataclass(frozen=True)
class MeasuredPlan:
    """One row: stages of ``layers`` layers each, all replicas alike."""

    name: str
    model: str
    gpu: str
    tp: int
    data: int
    layers: tuple[int, ...]
    microbatch_size: int
    microbatches: int
    measured_seconds: float
    rule_seconds: float
    doubt: str


def read_plans(path: str | Path) -> list[MeasuredPlan]:
    """The rows of a table of plans, with those that are in doubt."""
    with Path(path).open(newline="") as file:
        return [_plan(row) for row in csv.DictReader(file)]


def _plan(row: dict[str, str]) -> MeasuredPlan:
    kinds = {stage.strip().partition("x")[2] for stage in row["stages"].split("|")}
    if len(kinds) != 1:
        raise ProblemError(f"the plan {row['id']} mixes {sorted(kinds)}.", "Only plans of like replicas are read.")
    gpu, _, tp = kinds.pop().partition(":tp")
    return MeasuredPlan(
        name=row["id"],
        model=row["model"],
        gpu=gpu,
        tp=int(tp),
        data=int(row["dp"]),
        layers=tuple(int(n) for n in row["layers_per_stage"].split()),
        microbatch_size=int(row["microbatch_size"]),
        microbatches=int(row["microbatches"]),
        measured_seconds=float(row["measured_seconds"]),
        rule_seconds=float(row["sailor_rule_seconds"]),
        doubt=row["doubt"],
    )


def read_profiles(path: str | Path) -> dict[str, Any]:
    """Seconds per layer, sizes per layer, and the network's bandwidths, as published."""
    data: dict[str, Any] = json.loads(Path(path).read_text())
    return data


def predict(plan: MeasuredPlan, profiles: dict[str, Any]) -> float:
    """Seconds of one iteration."""
    wanted = (plan.model, plan.gpu, plan.microbatch_size, plan.tp)
    profile = next(
        (p for p in profiles["profiles"] if (p["model"], p["gpu"], p["microbatch"], p["tp"]) == wanted), None
    )
    if profile is None:
        raise ProblemError(
            f"there is no profile of {plan.model} on {plan.gpu} for micro-batch {plan.microbatch_size} and tp {plan.tp}.",
            "Profile it, or leave the plan out.",
        )
    sizes = profiles["models"][plan.model]["per_tp"][str(plan.tp)]
    ends = [sum(plan.layers[: k + 1]) for k in range(len(plan.layers))]
    spans = [slice(end - count, end) for end, count in zip(ends, plan.layers, strict=True)]
    hops = [
        transfer_seconds(FLOAT_BYTES * sizes["act_output_floats"][end - 1] * plan.microbatch_size, plan.gpu, profiles)
        for end in ends[:-1]
    ]
    borders = [sum(hops[max(0, k - 1) : k + 1]) for k in range(len(spans))]  # of one pass, either way
    timing = run(
        one_f_one_b(len(spans), plan.microbatches),
        pipeline(
            range(len(spans)),
            plan.microbatches,
            forward=[sum(profile["forward"][s]) + h for s, h in zip(spans, borders, strict=True)],
            inputs=[sum(profile["backward"][s]) + h for s, h in zip(spans, borders, strict=True)],
            weights=0.0,
        ),
    )
    sums = [_all_reduce(FLOAT_BYTES * sum(sizes["params_floats"][s]), plan, profiles) for s in spans]
    return timing.makespan + max(profile["update"]) + max(sums)


def transfer_seconds(size: float, gpu: str, profiles: dict[str, Any]) -> float:
    """Seconds of one message between two nodes over one card each: the bandwidth is a parabola of the size's
    logarithm.
    """
    a, b, c = next(fit for one, n, two, m, fit in profiles["network"] if (one, n, two, m) == (gpu, 1, gpu, 1))
    logarithm = math.log2(size / 1e6)
    return size / ((a * logarithm**2 + b * logarithm + c) * 1e9)


def _all_reduce(size: float, plan: MeasuredPlan, profiles: dict[str, Any]) -> float:
    if plan.data == 1:
        return 0.0
    full, rest = divmod(size, BUCKET_BYTES)
    buckets = [BUCKET_BYTES] * int(full) + ([rest] if rest else [])
    return sum(2 * (plan.data - 1) * transfer_seconds(b / plan.data, plan.gpu, profiles) for b in buckets)


def mean_error(plans: list[MeasuredPlan], profiles: dict[str, Any]) -> tuple[float, float]:
    """Mean relative error of the simulation and of Sailor's own rule, over the plans that are not in doubt."""
    judged = [plan for plan in plans if not plan.doubt]
    ours = [abs(predict(plan, profiles) / plan.measured_seconds - 1) for plan in judged]
    theirs = [abs(plan.rule_seconds / plan.measured_seconds - 1) for plan in judged]
    return sum(ours) / len(ours), sum(theirs) / len(theirs)
