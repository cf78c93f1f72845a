"""A row of the table: everything that is predicted of a stored plan, or of the plan that a search chooses.

Of a stored plan, per kind of rank (ranks whose programs are equal): the number of instructions of every phase with two
digests, one of *what* they do in their order, one of their *links* (the values they read and write, what they wait for,
bytes of working memory). A change that only renumbers values moves the second alone. Then the seconds and the bytes.
Nothing is searched: the file alone decides. Of a search, a digest of what was decided, its prediction and its bounds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from shardwright.cli.explain import rank_lines
from shardwright.costs.memory import memory
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.plans.stages import stage_text, strategy_text
from shardwright.program.instructions import Instruction
from shardwright.program.listing import listed
from shardwright.program.tasks import ListedLine
from shardwright.simulator import simulate_plan

Row = dict[str, Any]
MOST_RANKS = 8
"""Ranks of larger plans are not all listed: the first so many stand for the rest."""


def plan_row(path: Path) -> Row:
    """What is predicted of a stored plan.

    >>> plan_row(Path("bench/predictions/plans/gpt-fsdp.json"))["seconds"]                       # doctest: +SKIP
    """
    plan, graph = opened(path)
    timeline = simulate_plan(plan, graph)
    return {
        "case": path.stem,
        "seconds": timeline.seconds,
        "sum_seconds": timeline.sum_seconds,
        "exposed_seconds": timeline.exposed_seconds,
        "bytes": timeline.peak_bytes,
        "communication_bytes": timeline.communication_bytes,
        "stages": [
            {"busy": s.busy_seconds, "bubble": s.bubble, "exposed": s.exposed_seconds, "bytes": s.memory_bytes}
            for s in timeline.stages
        ],
        "ranks": rank_kinds(plan, graph),
    }


def opened(path: Path) -> tuple[Plan, Graph]:
    """A stored plan and its graph; operators of Hugging Face's are known once their module is imported."""
    plan = Plan.load(path)
    graph = plan.graph(trusted=True)
    if any(op.target.startswith("transformers.") for op in graph.ops):
        import_module("transformers.integrations.moe")
    return plan, graph


def search_row(name: str, plan: Plan) -> Row:
    """What a search chose and says of it."""
    chosen = [stage_text(replace(stage, prediction=None)) for stage in plan.stages]
    orders = [" ".join(map(str, order)) for order in plan.schedule.orders]
    if plan.whole:  # as such choices were written down before one mesh was a stage
        chosen, orders = [strategy_text(plan.stages[0].strategy, plan.stages[0].decisions)], []
    shape = " × ".join(f"{name} {size}" for name, size in plan.stages[0].strategy.axes)
    if not plan.whole:
        shape = f"{len(plan.stages)} stages, {plan.microbatches} micro-batches"
    p = plan.prediction
    return {
        "case": name,
        "plan": shape,
        "decided": digest([json.dumps([chosen, orders], sort_keys=True)]),
        "seconds": p.step_seconds,
        "sum_seconds": p.sum_seconds,
        "bytes": p.memory_bytes,
        "communication_bytes": p.communication_bytes,
        "exposed_seconds": p.exposed_seconds,
        "lower_bound": plan.proof.sum_bound,
        "step_bound": plan.proof.step_bound,
    }


def rank_kinds(plan: Plan, graph: Graph) -> dict[str, Row]:
    """By the ranks that do the same, their phases; of a step that is one program also the bytes that such a rank needs."""
    kinds: dict[str, tuple[list[int], Row]] = {}
    for rank in range(min(plan.devices, MOST_RANKS)):
        lines = rank_lines(plan, graph, rank)
        row: Row = {"instructions": len(lines), **_phases(lines)}
        program = lines[0].program
        if program is not None and len(program.instructions) == len(lines):
            place = plan.meshes[0].coordinates(rank)
            row["bytes"] = memory(program, plan.meshes[0].at(place).device).needed
        kinds.setdefault(json.dumps(row), ([], row))[0].append(rank)
    return {_runs(ranks): row for ranks, row in kinds.values()}


def _phases(lines: Sequence[ListedLine]) -> dict[str, str]:
    """Per phase: how many instructions, a digest of what they do, one of how they are linked."""
    rows = listed(lines)
    whats: dict[str, list[str]] = {}
    links: dict[str, list[str]] = {}
    for row, (instruction, *_) in zip(rows, lines, strict=True):
        whats.setdefault(row["phase"], []).append(_what(row, instruction))
        links.setdefault(row["phase"], []).append(_links(instruction))
    return {phase: f"{len(whats[phase])} {digest(whats[phase])} {digest(links[phase])}" for phase in whats}


def _what(row: Row, instruction: Instruction) -> str:
    """All of an instruction that is no number of a value or of another instruction."""
    told = [row[key] for key in ("stage", "microbatch", "kind", "what", "stream", "bytes", "module")]
    steps = [(step, bound) for _, step, bound in instruction.steps]
    return repr((*told, instruction.name, instruction.collective, steps, instruction.leg))


def _links(instruction: Instruction) -> str:
    i = instruction
    return repr((i.reads, i.writes, i.after, i.last, i.early, i.node, i.bucket, i.temporary))


def digest(lines: Iterable[str]) -> str:
    """Ten hexadecimal digits that stand for these lines.

    >>> digest(["a", "b"]) == digest(["a", "b"]) != digest(["ab"])
    True
    """
    found = hashlib.sha256()
    for line in lines:
        found.update(line.encode())
        found.update(b"\n")
    return found.hexdigest()[:10]


def _runs(ranks: Sequence[int]) -> str:
    """``0-2,5``."""
    found = []
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        found.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(found)
