"""Never worse than any baseline, by the same prices and simulation: what ``shardwright plan --stages auto`` finds, and what
every recipe comes to by itself.

    python -m bench.never_worse [NAME …] [--most-seconds 600]     # runs what the results lack, most important first
    python -m bench.never_worse --table                           # the results as a table

*Found* is the plan that a user gets (:func:`shardwright.planner.plan_jointly` with its defaults). Pipelines (megatron-3d,
gpipe, pipedream, alpa) are those of the same search, each simulated; every recipe on one mesh is searched by its own
name, under the same memory, and simulated. A recipe below the plan found is a violation. Every row is a line of
``bench/measured/joint/never_worse.jsonl`` as soon as it is done, with the commit and a digest of the sources; seconds are
CPU seconds from the captured graph to the plan, all baselines of the search included.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.runtime_verify import commit, recorded, sources
from shardwright.cluster import parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph, plan_jointly
from shardwright.planner.joint import Joint
from shardwright.plans import Plan
from shardwright.search.baselines import BASELINES
from shardwright.search.solution import gap_of
from shardwright.simulator.what_if import order_name
from shardwright.zoo import ENTRIES
from shardwright.zoo.reference import resolve

RESULTS = Path(__file__).parent / "measured" / "joint" / "never_worse.jsonl"
CLUSTERS = {8: "8xH100", 64: "8x8xH100", 512: "64x8xH100"}
TOLERANCE = 1e-9

LLAMA = (
    "hf:llama:hidden_size={},intermediate_size={},num_attention_heads={},num_key_value_heads=8,num_hidden_layers={},"
    "vocab_size={}"
)
MODELS = {  # reference, rows for each device, positions
    "llama-70b": (LLAMA.format(8192, 28672, 64, 80, 32000), 4, 4096),
    "llama-8b": (LLAMA.format(4096, 14336, 32, 32, 128256), 4, 4096),
    "gpt2-xl": ("hf:gpt2:n_layer=48,n_embd=1600,n_head=25", 8, 1024),
    "mixtral-8x22b": (
        "hf:mixtral:hidden_size=6144,intermediate_size=16384,num_attention_heads=48,num_key_value_heads=8,"
        "num_hidden_layers=56,num_local_experts=8,num_experts_per_tok=2,vocab_size=32000",
        4,
        4096,
    ),
    "t5-11b": ("hf:t5:d_model=1024,d_ff=65536,num_heads=128,d_kv=128,num_layers=24,num_decoder_layers=24", 8, 512),
    "vit-22b": (
        "hf:vit:hidden_size=6144,intermediate_size=24576,num_hidden_layers=48,num_attention_heads=48,image_size=224,"
        "patch_size=14",
        16,
        None,
    ),
    **{name: (name, 16, None) for name in ENTRIES},
}


@dataclass(frozen=True)
class Case:
    """One row: a model on so many devices."""

    model: str
    devices: int


def cases() -> list[Case]:
    """The most important first."""
    large = [name for name in MODELS if name not in ENTRIES]
    order = [Case(name, count) for count in (64, 8) for name in large] + [Case(name, 8) for name in ENTRIES]
    order += [Case(name, 512) for name in large] + [Case(name, count) for count in (64, 512) for name in ENTRIES]
    return list(dict.fromkeys(order))


def graph_of(case: Case) -> Graph:
    reference, rows, positions = MODELS[case.model]
    resolved = resolve(reference, batch=rows * case.devices, seq=positions, dtype="bfloat16")
    return capture(resolved.model, resolved.args, resolved.kwargs)


def measured(case: Case, every: bool) -> dict[str, Any]:
    """A row of the results."""
    graph, cluster = graph_of(case), parse_cluster(CLUSTERS[case.devices])
    began = time.process_time()
    plan, joint = plan_jointly(graph, cluster, Options(), reference=MODELS[case.model][0])
    seconds = time.process_time() - began
    steps: dict[str, float | str] = {}
    for row in plan.candidates[1:]:
        fits = row.prediction is not None and row.prediction.fits
        steps[row.name] = row.prediction.step_seconds if fits and row.prediction else row.note or "does not fit"
    if joint is not None:
        steps |= delivered_steps(joint)
    for name in BASELINES if every else ():
        if name not in steps or isinstance(steps[name], str):
            steps[name] = alone(graph, case, name)
    return {
        "plan": _shape(plan),
        "order": "" if plan.whole else order_name(plan.schedule),
        "step": plan.prediction.step_seconds,
        "memory": plan.prediction.memory_bytes,
        "bound": plan.proof.step_bound,
        "cpu_seconds": seconds,
        "pipelines_seconds": joint.best.search_seconds if joint is not None else None,
        "summed": joint.best.step_seconds if joint is not None else None,
        "baselines": steps,
        "every": every,
        "all_seconds": time.process_time() - began,
        "notes": list(plan.notes),
    }


def delivered_steps(joint: Joint) -> dict[str, float | str]:
    """The simulated step of the best pipeline, of every pipeline recipe and in every other order, or why there is none."""
    steps: dict[str, float | str] = {}
    for name, found in {"pipeline": joint.best, **joint.recipes, **joint.others}.items():
        try:
            steps[name] = found if isinstance(found, str) else joint.deliver(found).prediction.step_seconds
        except ShardwrightError as error:
            steps[name] = error.message
    return steps


def alone(graph: Graph, case: Case, name: str) -> float | str:
    """The step of a recipe by its own name, or why there is none."""
    try:
        found = plan_graph(
            graph,
            parse_cluster(CLUSTERS[case.devices]),
            Options(search=name, baselines=(), fewer_devices=False),
        )
    except ShardwrightError as error:
        return error.message
    return found.prediction.step_seconds


def _shape(plan: Plan) -> str:
    if not plan.whole:
        sizes = " + ".join("×".join(str(size) for _, size in stage.strategy.axes) for stage in plan.stages)
        return f"{len(plan.stages)} stages ({sizes}), {plan.microbatches} micro-batches"
    return " × ".join(str(size) for _, size in plan.stages[0].strategy.axes)


def worst(row: dict[str, Any]) -> tuple[float, str]:
    """The fastest baseline that fits, divided by the plan found; above 1 is as it should be."""
    steps = {name: step for name, step in row["baselines"].items() if isinstance(step, float)}
    best = min(steps, key=lambda name: steps[name], default="")
    return (steps[best] / row["step"] if best else float("inf")), best


def table() -> int:
    """Print the latest rows; the number of violations."""
    rows = {(row["model"], row["devices"]): row for row in recorded(RESULTS)}
    print("| model | devices | rows | found, s | plan | best baseline | ÷ found | bound, s | gap | CPU s |")
    print("|---|--:|--:|--:|---|---|--:|--:|--:|--:|")
    violated = 0
    for case in cases():
        row = rows.get((case.model, case.devices))
        if row is None:
            continue
        name, batch = f"| {case.model} | {case.devices}", MODELS[case.model][1] * case.devices
        if "failed" in row:
            print(f"{name} | {batch} | {row['failed']} |" + " |" * 6)
            continue
        ratio, best = worst(row)
        violated += ratio < 1 - TOLERANCE
        gap = 100 * gap_of(row["step"], row["bound"])
        print(
            f"{name} | {batch} | {row['step']:.4g} | {row['plan']} | {best} | "
            f"{'**violated** ' if ratio < 1 - TOLERANCE else ''}{ratio:.3f} | {row['bound']:.4g} | {gap:.1f} % | "
            f"{row['cpu_seconds']:.1f} |{'' if row['every'] else ' only baselines that the search shows'}"
        )
    left = [f"{c.model} on {c.devices}" for c in cases() if (c.model, c.devices) not in rows]
    print(f"\nnot run: {', '.join(left) or 'none'}; violations: {violated}")
    return violated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="Models, or MODEL@DEVICES; all where none is named")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--again", action="store_true", help="Also rows that are there already")
    parser.add_argument("--quick", action="store_true", help="Only the baselines that the search shows by itself")
    parser.add_argument("--most-seconds", type=float, default=float("inf"), help="Start no further row after these")
    arguments = parser.parse_args()
    began, wanted = time.perf_counter(), set(arguments.names)
    done = {(row["model"], row["devices"]) for row in recorded(RESULTS)} if not arguments.again else set()
    for case in [] if arguments.table else cases():
        named = {case.model, f"{case.model}@{case.devices}"}
        late = time.perf_counter() - began > arguments.most_seconds
        if (case.model, case.devices) in done or (wanted and not named & wanted) or late:
            continue
        row: dict[str, Any] = {"model": case.model, "devices": case.devices}
        try:
            row |= measured(case, every=not arguments.quick)
        except ShardwrightError as error:  # nothing fits, for example: a result too
            row |= {"failed": error.message}
        print(json.dumps(row), flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row | {"commit": commit(), "sources": sources()}) + "\n")
    return table()


if __name__ == "__main__":
    raise SystemExit(main())
