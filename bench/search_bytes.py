"""How far the bytes by which pipelines are searched are from the replay of their programs: what the search takes a stage to
hold, over what its ranks hold when the programs of the delivered plan are replayed.

    python -m bench.search_bytes [CASE …]      # measures
    python -m bench.search_bytes --table       # what the results say

Per case the joint search runs under several limits on memory; of every pipeline that it finds (the fastest, the recipes',
those in other orders) each stage is a row. Rows are lines of ``bench/measured/joint/search_bytes.jsonl``, with the commit
and a digest of the sources. ``resting``, ``kept``, ``held`` and ``working`` are the parts of the replay.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.never_worse import LLAMA
from bench.runtime_verify import commit, sources
from shardwright.cluster import Cluster, parse_cluster
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.errors import Infeasible, LoweringError, PlanError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options
from shardwright.planner.joint import Joint, find_pipelines
from shardwright.program.pipeline import Pipeline
from shardwright.search.joint.pipelines import JointPlan
from shardwright.simulator.links import Links
from shardwright.simulator.play import Played
from shardwright.simulator.stages import price_stages
from shardwright.simulator.timeline import Timeline
from shardwright.zoo.reference import resolve

RESULTS = Path(__file__).parent / "measured" / "joint" / "search_bytes.jsonl"
LIMITS = (1.0, 0.7, 0.5)
"""Shares of what the fastest pipeline takes, under which others are searched."""
CASES: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "gpt": ("gpt:layers=8,width=2048,heads=16,seq=512,vocab=8192", {"batch": 32, "dtype": "bfloat16"}, "2x2xH100"),
    "llama": (
        "llama:layers=8,width=2048,heads=16,kv_heads=4,inner=5632,seq=1024,vocab=16384",
        {"batch": 32, "dtype": "bfloat16"},
        "2x4xH100",
    ),
    "moe": (
        "moe:layers=4,width=1024,heads=16,kv_heads=4,inner=3584,seq=512,vocab=8192",
        {"batch": 16, "dtype": "bfloat16"},
        "8xH100",
    ),
    "bert": ("bert:layers=8,seq=256,vocab=8192", {"batch": 32}, "4xA100"),
    "vit": ("hf:vit:small,num_hidden_layers=8", {"batch": 16}, "4xH100"),
    "t5": (
        "hf:t5:num_layers=4,num_decoder_layers=4,d_model=512,d_ff=2048,num_heads=8,d_kv=64,vocab_size=8192",
        {"batch": 16, "seq": 128},
        "4xH100",
    ),
    "resnet": ("resnet50", {"batch": 32}, "4xV100"),
    "llama-70b": (
        LLAMA.format(8192, 28672, 64, 80, 32000),
        {"batch": 256, "seq": 4096, "dtype": "bfloat16"},
        "8x8xH100",
    ),
}


def rows(graph: Graph, cluster: Cluster, limits: tuple[float, ...] = LIMITS) -> Iterator[dict[str, Any]]:
    """Every stage of every pipeline that is found."""
    options = Options(baselines=(), fewer_devices=False)
    free = find_pipelines(graph, cluster, replace(options, ignore_device_memory=True, memory_limit=1e15))
    most = max(stage.memory_bytes for stage in free.best.stages)
    for share in limits:
        try:
            joint = (
                free if share == 1.0 else find_pipelines(graph, cluster, replace(options, memory_limit=share * most))
            )
        except Infeasible:
            continue
        found = {"pipeline": joint.best, **joint.recipes, **joint.others}
        for name, plan in found.items():
            if isinstance(plan, JointPlan):
                yield from ({"limit": share, "name": name, **row} for row in of_plan(joint, plan))


def of_plan(joint: Joint, found: JointPlan) -> Iterator[dict[str, Any]]:
    """Every stage of a pipeline."""
    try:
        line = timeline(joint, found)
    except (LoweringError, PlanError):
        return  # it could not be run
    for number, stage in enumerate(found.stages):
        one = line.stage(number).bytes
        group = line.pipeline.schedule.device_of[number]
        yield {
            "order": found.schedule,
            "microbatch": found.microbatch,
            "stage": [number, stage.strategy_name, *stage.strategy.sizes],
            "blocks": [stage.last_block - stage.first_block, stage.recomputed_blocks, stage.lightly_blocks],
            "holds": stage.holds,
            "searched": stage.memory_bytes,
            "replayed": line.memory[group],
            "ratio": stage.memory_bytes / line.memory[group],
            "resting": one.resting,
            "kept": one.kept,
            "held": one.held,
            "working": one.working,
        }


def timeline(joint: Joint, found: JointPlan) -> Timeline:
    """Its programs priced, not played: what ranks hold."""
    stages, order = joint.proposal(found).laid()
    meshes = [stage.mesh_of(joint.cluster) for stage in stages]
    pipe = Pipeline.of(joint.graph, stages, order.microbatches, order, joint.options.batch_norm)
    times = price_stages(pipe, meshes, [PricedDecisions(mesh) for mesh in meshes], joint.options.optimizer)
    return Timeline(pipe, times, Links(pipe, joint.cluster), Played([], [], [], []))


def table() -> None:
    every = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    last = {row["case"]: row["sources"] for row in every}
    print("| case | stages | median | least | most | within 2 % | within 10 % | sources |\n" + "|---" * 8 + "|")
    for case, own in last.items():
        ratios = [row["ratio"] for row in every if (row["case"], row["sources"]) == (case, own)]
        near = [sum(abs(r - 1) <= by for r in ratios) / len(ratios) for by in (0.02, 0.1)]
        shown = (median(ratios), min(ratios), max(ratios), *near)
        print(f"| {case} | {len(ratios)} | " + " | ".join(f"{one:.3f}" for one in shown) + f" | {own} |")


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("-")]
    if "--table" in sys.argv:
        return table()
    for name in names or CASES:
        reference, given, where = CASES[name]
        resolved = resolve(reference, **given)
        graph = capture(resolved.model, resolved.args, resolved.kwargs)
        with RESULTS.open("a") as file:
            for row in rows(graph, parse_cluster(where)):
                print(
                    json.dumps({"case": name, **row, "commit": commit(), "sources": sources()}), file=file, flush=True
                )
    return table()


if __name__ == "__main__":
    main()
