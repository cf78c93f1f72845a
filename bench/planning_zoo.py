"""Whether the plan found is at least as good as every baseline that fits, over the zoo: ``python -m bench.planning_zoo``.

Every model of the zoo on a cluster it was used on. *Found* is the plan a user gets without asking for anything (three
baselines are simulated beside the search); every baseline by name is then searched by itself, on all meshes, under the same
memory and prices, with blocks recomputed where nothing else fits, and simulated. A ratio below 1 is a violation and is
printed as one. Results are kept in ``--cache`` as they come, so that a run can be interrupted, continued (``--models``)
and printed again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.cluster import parse_cluster
from shardwright.errors import Infeasible
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.search.baselines import BASELINES
from shardwright.zoo.reference import resolve

ZOO = {
    "alexnet": "8xGTX-1080Ti",
    "inception": "8xGTX-1080Ti",
    "rnnlm": "8xGTX-1080Ti",
    "transformer": "2x8xGTX-1080Ti",
    "wresnet50": "8xK80",
    "rnn": "8xK80",
    "bert": "8xH100",
    "gpt": "8xH200",
    "llama": "8xH100",
    "moe": "8x8xH100",
}
HEURISTICS = ("recursive", "spartan")
FOUND = "found"


def priced(graph: Graph, cluster: str, name: str) -> dict[str, Any]:
    """The step a search by this name finds; ``found`` is what a user gets by default."""
    options = Options(fewer_devices=False)
    if name != FOUND:
        options = replace(options, search=name, baselines=())
    started = time.perf_counter()
    try:
        plan = plan_graph(graph, parse_cluster(cluster), options)
    except Infeasible as error:
        return {"seconds": None, "why": error.message, "planned": time.perf_counter() - started}
    return {
        "seconds": plan.prediction.step_seconds,
        "sum": plan.prediction.sum_seconds,
        "memory": plan.prediction.memory_bytes,
        "mesh": [size for _, size in plan.stages[0].strategy.axes],
        "notes": list(plan.notes),
        "planned": time.perf_counter() - started,
    }


def row(model: str, results: dict[str, Any]) -> str:
    """One line of the table: the plan found beside the best baseline, and those that do not fit."""
    found = results[FOUND]
    steps = {n: r["seconds"] for n, r in results.items() if n != FOUND and r["seconds"] is not None}
    best = min(steps, key=lambda n: steps[n]) if steps else None
    ratio = steps[best] / found["seconds"] if best and found["seconds"] else float("nan")
    mesh = " × ".join(str(size) for size in found.get("mesh", ()))
    shown = f"{best}, {steps[best]:.4g} s" if best else "none fits"
    others = len(results) - 1
    missing = f"{others - len(steps)} of {others}"
    note = "; ".join(found.get("notes", ()))
    return (
        f"| {model} | {ZOO[model]} | {found['seconds'] or float('nan'):.4g} s | {mesh} | {shown} | "
        f"{'**violated** ' if ratio < 1 - 1e-9 else ''}{ratio:.3f} | {missing} | {found['planned']:.1f} | {note} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--names", nargs="*", default=[FOUND, *BASELINES, *HEURISTICS])
    parser.add_argument("--cache", type=Path, default=None, help="A JSON file to keep results in and to continue from")
    parser.add_argument("--details", action="store_true", help="Also print every baseline's step")
    arguments = parser.parse_args()
    cache = arguments.cache
    known: dict[str, dict[str, Any]] = json.loads(cache.read_text()) if cache and cache.exists() else {}
    print("| model | cluster | found | mesh | best baseline | baseline / found | do not fit | plan s | notes |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in arguments.models:
        results = known.setdefault(model, {})
        missing = [name for name in arguments.names if name not in results]
        if missing:
            resolved = resolve(model)
            graph = capture(resolved.model, resolved.args, resolved.kwargs)
        for name in missing:
            results[name] = priced(graph, ZOO[model], name)
            if cache:
                cache.write_text(json.dumps(known, indent=1))
        print(row(model, results), flush=True)
        for name, result in results.items() if arguments.details else ():
            step = f"{result['seconds']:.5g} s" if result["seconds"] else result["why"]
            print(f"  {name}: {step}, planned in {result['planned']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
