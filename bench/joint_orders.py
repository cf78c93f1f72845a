"""What other orders of passes than 1F1B gain, by the same prices and simulation.

    python -m bench.joint_orders [MODEL@DEVICES …]     # cases of bench.never_worse; those that are not there yet
    python -m bench.joint_orders --table

For every case the joint search alone (no plan on one mesh to beat): the fastest simulated pipeline in 1F1B (recipes
included), then every other order that the search simulates beside it, and the one that is taken. Every row is a line of
``bench/measured/joint/orders.jsonl`` as soon as it is done; seconds are CPU seconds of search and simulation.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from bench.never_worse import CLUSTERS, MODELS, Case, cases, graph_of
from bench.runtime_verify import commit, recorded, sources
from shardwright.cluster import parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.planner import Options
from shardwright.planner.joint import find_pipelines
from shardwright.search.joint.orders import OTHERS
from shardwright.simulator.what_if import order_name
from shardwright.zoo import ENTRIES

RESULTS = Path(__file__).parent / "measured" / "joint" / "orders.jsonl"


def measured(case: Case) -> dict[str, Any]:
    """A row of the results."""
    graph = graph_of(case)
    began = time.process_time()
    joint = find_pipelines(graph, parse_cluster(CLUSTERS[case.devices]), Options())
    plan, judged = joint.fastest(MODELS[case.model][0])
    assert plan is not None and plan.schedule is not None  # nothing has to be beaten
    steps = {name: one.seconds if one.refusal is None else one.refusal.message for name, one in judged.items()}
    return {
        "order": order_name(plan.schedule),
        "stages": len(plan.stages),
        "groups": plan.schedule.devices,
        "microbatches": plan.microbatches,
        "step": plan.prediction.step_seconds,
        "bound": plan.proof.step_bound,
        "simulated": steps,
        "summed": {"1f1b": joint.best.step_seconds, **{name: one.step_seconds for name, one in joint.others.items()}},
        "cpu_seconds": time.process_time() - began,
    }


def table() -> None:
    """Print the latest rows."""
    print("| model | devices | taken | groups × micro-batches | step, s | in 1F1B, s | ÷ taken | bound, s | CPU s |")
    print("|---|--:|---|---|--:|--:|--:|--:|--:|")
    for (model, devices), row in {(row["model"], row["devices"]): row for row in recorded(RESULTS)}.items():
        if "failed" in row:
            print(f"| {model} | {devices} | {row['failed']} |" + " |" * 6)
            continue
        plain = [s for name, s in row["simulated"].items() if name not in OTHERS and isinstance(s, float)]
        best = min(plain, default=float("nan"))
        print(
            f"| {model} | {devices} | {row['order']} | {row['groups']} × {row['microbatches']} | {row['step']:.4g} | "
            f"{best:.4g} | {best / row['step']:.3f} | {row['bound']:.4g} | {row['cpu_seconds']:.1f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="MODEL@DEVICES; without, the large models that are not there yet")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    done = {(row["model"], row["devices"]) for row in recorded(RESULTS)}
    wanted = [Case(model, int(count)) for model, count in (name.split("@") for name in arguments.names)]
    left = [case for case in cases() if case.model not in ENTRIES and (case.model, case.devices) not in done]
    for case in [] if arguments.table else wanted or left:
        row: dict[str, Any] = {"model": case.model, "devices": case.devices}
        try:
            row |= measured(case)
        except ShardwrightError as error:
            row |= {"failed": error.message}
        print(json.dumps(row), flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row | {"commit": commit(), "sources": sources()}) + "\n")
    table()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
