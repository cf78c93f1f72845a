"""Aceso's problems (Liu et al., EuroSys 2024): a chain of profiled operators, cut anywhere, each operator recomputed
or not.

A stage runs operators i..j with tensor degree tp and data degree dp. Seconds of a micro-batch: Σ forward + backward,
Σ forward of what is recomputed, and the transfers in and out by a table of bandwidths. Memory: eight times the
weights, what is kept per micro-batch held, the largest run of recomputed operators, and what the allocator reserves.
With m micro-batches a step takes (m − 1) · slowest + Σ stages. ``check`` is the rule, operator by operator;
``solve_aceso`` finds the best plan: per micro-batch size a pipeline problem whose stages are priced in
``aceso_stages``, first with cuts between layers only (a good plan, so a limit), then with all cuts that the limit
leaves.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.published.anytime import Report, nobody
from bench.published.reading import REMEDY, between
from bench.published.reading import check as require
from shardwright.errors import Infeasible, ProblemError, TooLarge
from shardwright.files import read_json
from shardwright.records import read_record, shown
from shardwright.search.joint.problem import Floats
from shardwright.search.solution import Solution

LAYER_START = "enc-1st-layernorm"
ATTENTION_FACTORS = {"enc-attention-dropout": 1.5, "enc-attention-softmax": 0.0}
NEVER_RECOMPUTED = ("encoder-embedding", "gpt-post-process")
DEGREES = (1, 2, 4, 8)
MOST_DEVICES = 4096
MOST_IN_LAYER = 16
"""Operators of a layer: all ways to recompute them are listed."""
MOST_STAGES = 5e7
"""Candidate stages times devices: the tables of prices would not fit into memory."""
SMALLEST_MB = 1e-3
"""Of a transfer: the table of bandwidths begins with 1 MB, and smaller ones count from its end."""
COLUMNS = (
    "forward_us",
    "backward_us",
    "input_mb",
    "output_mb",
    "weights_mb",
    "activations_mb",
    "reserved_forward_mb",
    "reserved_backward_mb",
)


@dataclass(frozen=True)
class AcesoProblem:
    """One model with its profiles and machine. Profiles hold one row per operator: head, one layer, tail."""

    name: str
    layers: int
    head: tuple[str, ...]
    layer: tuple[str, ...]
    tail: tuple[str, ...]
    devices: int
    devices_per_node: int
    global_batch: int
    memory_mb: float
    bandwidth_within: tuple[float, ...]
    bandwidth_between: tuple[float, ...]
    profiles: dict[tuple[int, int], Floats]

    @property
    def operators(self) -> tuple[str, ...]:
        return self.head + self.layer * self.layers + self.tail

    def rows(self, microbatch: int, tp: int) -> Floats:
        """The profile of every operator of the chain."""
        table = self.profiles[microbatch, tp]
        h, n = len(self.head), len(self.layer)
        return np.concatenate([table[:h], np.tile(table[h : h + n], (self.layers, 1)), table[h + n :]])


@dataclass(frozen=True)
class AcesoStage:
    """Operators ``start``..``end`` (exclusive) on tp · dp devices; one flag per operator: recomputed or not."""

    start: int
    end: int
    tp: int
    dp: int
    recompute: tuple[bool, ...]


@dataclass(frozen=True)
class AcesoPlan:
    microbatch: int
    stages: tuple[AcesoStage, ...]


@dataclass(frozen=True)
class _Profile:
    others_allowed: ClassVar[bool] = True
    microbatch: int
    tp: int
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class _Model:
    others_allowed: ClassVar[bool] = True
    layers: int
    devices: int
    global_batch: int
    head_ops: tuple[str, ...]
    layer_ops: tuple[str, ...]
    tail_ops: tuple[str, ...]
    columns: tuple[str, ...]
    profiles: tuple[_Profile, ...]


@dataclass(frozen=True)
class _Machine:
    others_allowed: ClassVar[bool] = True
    devices_per_node: int
    memory_limit_mb: float
    bandwidth_gb_per_s_within_node: tuple[float, ...]
    bandwidth_gb_per_s_between_nodes: tuple[float, ...]
    models: tuple[dict[str, Any], ...]


def read_aceso(source: str | Path | dict[str, Any], model: str | None = None) -> AcesoProblem:
    """One model of a file; ``model`` names it where the file has several. Only that one need be right."""
    data = source if isinstance(source, dict) else read_json(source, ProblemError)
    machine = read_record(
        _Machine, data, where="the file is no problem of Aceso's", error=ProblemError, remedy=REMEDY,
    )  # fmt: skip
    known = {str(m.get("name")): m for m in machine.models}
    if model is None and len(known) == 1:
        model = next(iter(known))
    if model is None or model not in known:
        raise ProblemError(f"there is no model {model!r} in the file.", f"It has: {', '.join(known)} (--model).")
    chosen = read_record(_Model, known[model], where=f"the model {model[:60]}", error=ProblemError, remedy=REMEDY)
    _check_machine(machine)
    _check_model(chosen)
    return AcesoProblem(
        name=model,
        layers=chosen.layers,
        head=chosen.head_ops,
        layer=chosen.layer_ops,
        tail=chosen.tail_ops,
        devices=chosen.devices,
        devices_per_node=machine.devices_per_node,
        global_batch=chosen.global_batch,
        memory_mb=machine.memory_limit_mb,
        bandwidth_within=machine.bandwidth_gb_per_s_within_node,
        bandwidth_between=machine.bandwidth_gb_per_s_between_nodes,
        profiles={(p.microbatch, p.tp): np.array(p.rows, dtype=np.float64) for p in chosen.profiles},
    )


def _check_machine(machine: _Machine) -> None:
    within, beyond = machine.bandwidth_gb_per_s_within_node, machine.bandwidth_gb_per_s_between_nodes
    between(machine.devices_per_node, 1, MOST_DEVICES, "devices_per_node")
    between(machine.memory_limit_mb, 0, 1e12, "memory_limit_mb")
    require(0 < len(within) == len(beyond) <= 64, "the tables of bandwidths have unlike lengths")
    require(min(beyond) > 1e-6 and max(within) < 1e9, "a bandwidth is no number of GB/s")
    require(
        all(b <= a for a, b in zip(within, beyond, strict=True)), "transfers between nodes are faster than within one"
    )


def _check_model(model: _Model) -> None:
    between(model.layers, 1, 10_000, "layers")
    between(model.devices, 1, MOST_DEVICES, "devices")
    between(model.global_batch, 1, 10**9, "global_batch")
    between(len(model.layer_ops), 1, MOST_IN_LAYER, "the number of layer_ops")
    between(len(model.head_ops), 1, 100, "the number of head_ops")
    between(len(model.tail_ops), 1, 100, "the number of tail_ops")
    chain = len(model.head_ops) + model.layers * len(model.layer_ops) + len(model.tail_ops)
    if chain**2 / 2 * model.devices > MOST_STAGES:
        raise TooLarge(f"{chain} operators on {model.devices} devices have too many stages.", "Give a smaller model.")
    require(tuple(model.columns) == COLUMNS, f"the columns {shown(model.columns)} are not {list(COLUMNS)}")
    require(bool(model.profiles), "profiles is empty")
    count = len(model.head_ops) + len(model.layer_ops) + len(model.tail_ops)
    for profile in model.profiles:
        where = f"of micro-batch {profile.microbatch} and tp {profile.tp}"
        between(profile.microbatch, 1, 10**6, f"microbatch {where}")
        between(profile.tp, 1, MOST_DEVICES, f"tp {where}")
        require(len(profile.rows) == count, f"the profile {where} has {len(profile.rows)} rows, not {count}")
        require(
            all(len(row) == len(COLUMNS) for row in profile.rows), f"a row of the profile {where} has other columns"
        )
        require(
            all(0 <= x <= 1e12 for row in profile.rows for x in row), f"a number of the profile {where} is out of range"
        )
        sizes = [x for row in profile.rows for x in row[2:4]]
        require(all(x == 0 or x >= SMALLEST_MB for x in sizes), f"a transfer of the profile {where} is too small")


def hop_ms(megabytes: float, table: tuple[float, ...]) -> float:
    """Milliseconds of a transfer between stages; the table is for 1, 2, 4 … MB."""
    if megabytes == 0:
        return 0.0
    k = math.floor(math.log2(megabytes))
    return megabytes / table[max(min(k - 1 if k >= 1 else k, len(table) - 1), -len(table))]


def activations(problem: AcesoProblem, rows: Floats, start: int) -> Floats:
    """Megabytes that the rows' operators keep, with the factors of attention's softmax and dropout."""
    names = problem.operators[start : start + len(rows)]
    return rows[:, 5] * np.array([ATTENTION_FACTORS.get(name, 1.0) for name in names])


def check(problem: AcesoProblem, plan: AcesoPlan) -> tuple[list[float], list[float]]:
    """Seconds of the step as each stage sees it, and megabytes of each stage: the published rules, word by word."""
    names, times, memory, before = problem.operators, [], [], 0
    for number, stage in enumerate(plan.stages):
        rows = problem.rows(plan.microbatch // stage.dp, stage.tp)[stage.start : stage.end]
        flags = np.array(stage.recompute)
        after = before + stage.tp * stage.dp
        into = hop_ms(rows[0, 2], _table(problem, before))
        out = hop_ms(rows[-1, 3], _table(problem, after))
        times.append((rows[:, :2].sum() + rows[flags, 0].sum()) / 1e3 + into + out)
        kept = activations(problem, rows, stage.start)
        saved = peak = run = 0.0
        last = len(rows) - 1
        for i in range(last):
            if not (flags[i] and flags[i + 1]):
                continue
            run += kept[i]
            layer_ends = names[stage.start + i + 1] == LAYER_START
            saved += 0.0 if layer_ends else kept[i]
            if layer_ends or i + 1 == last or not flags[i + 2]:
                cut_off = i + 1 == last and names[stage.start + i] in ATTENTION_FACTORS
                peak = peak if cut_off else max(peak, run)
                run = 0.0
        weights = rows[:, 4].sum()
        reserved = max(rows[:-1, 6].max(initial=0.0) + rows[:-1, 7].max(initial=0.0), weights)
        held = len(plan.stages) - number
        memory.append(8 * weights + (rows[0, 2] + kept.sum() - saved) * held + peak + reserved)
        before = after
    repeats = problem.global_batch // plan.microbatch - 1
    return [(repeats * t + sum(times)) / 1e3 for t in times], memory


def _table(problem: AcesoProblem, devices: int) -> tuple[float, ...]:
    between = devices > 0 and devices % problem.devices_per_node == 0
    return problem.bandwidth_between if between else problem.bandwidth_within


def solve_aceso(problem: AcesoProblem, report: Report = nobody) -> Solution[AcesoPlan]:
    """The best plan over all micro-batch sizes; the bound is the least of theirs."""
    from bench.published.aceso_stages import MicrobatchSearch

    started = time.perf_counter()
    searches = [MicrobatchSearch(problem, size) for size in _microbatches(problem)]
    best: Solution[AcesoPlan] | None = None
    bounds: list[float] = []
    ordered = sorted(searches, key=lambda s: s.work_bound)

    def so_far(found: Solution[AcesoPlan]) -> None:
        least = min(found.cost, ordered[len(bounds)].work_bound, *bounds)  # that of the present size is the next least
        report(replace(found, lower_bound=least, optimal=False))

    for search in ordered:
        limit = best.cost if best else np.inf
        if search.work_bound >= limit:
            bounds.append(search.work_bound)
            continue
        found, bound = search.solve(limit, so_far)
        bounds.append(bound)
        if found is not None and (best is None or found.cost < best.cost):
            best = found
    if best is None:
        raise Infeasible(
            f"no plan of {problem.name} fits into {problem.memory_mb:g} MB on {problem.devices} devices.",
            "Give it more devices or more memory per device.",
        )
    bound = min(best.cost, *bounds)
    return Solution(best.answer, best.cost, bound, bound >= best.cost * (1 - 1e-12), time.perf_counter() - started)


def _microbatches(problem: AcesoProblem) -> list[int]:
    local = {size for size, _ in problem.profiles}
    sizes = {size * dp for size in local for dp in DEGREES if dp <= problem.devices}
    return sorted(size for size in sizes if problem.global_batch % size == 0)


def plan_from_published(published: dict[str, Any]) -> AcesoPlan:
    """A plan as the data lists it."""
    ends = np.cumsum(published["ops"]).tolist()
    return AcesoPlan(
        published["microbatch"],
        tuple(
            AcesoStage(end - count, end, tp, dp, tuple(digit == "1" for digit in digits))
            for end, count, tp, dp, digits in zip(
                ends, published["ops"], published["tp"], published["dp"], published["recompute"], strict=True
            )
        ),
    )
