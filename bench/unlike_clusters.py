"""Unlike devices and unlike links: the plan found against the best that takes all of them for alike.

    python -m bench.unlike_clusters [NAME …] [--table]

*Found* is what ``shardwright plan --stages auto`` answers, simulated. Alike are: every plan on one mesh of all devices with
equal shares, each as fast as the slowest device and the slowest link allow (the search's own best one and every recipe by
name); on unlike devices also equal stages (megatron-3d and GPipe, every factorisation, each stage at the speed of its own
devices, simulated). Two nodes behind a slow link have like devices, so equal stages are no blindness there; they are shown.
Every row is a line of ``bench/measured/joint/unlike_clusters.jsonl`` as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.never_worse import LLAMA, delivered_steps
from bench.runtime_verify import commit, recorded, sources
from shardwright.cluster import Cluster, Link, parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph, plan_jointly
from shardwright.search.baselines import BASELINES
from shardwright.zoo.reference import resolve

RESULTS = Path(__file__).parent / "measured" / "joint" / "unlike_clusters.jsonl"
ETHERNET = Link("Ethernet, 25 Gbit/s for a node", 5e-5, 3.1e9, shared=True)
GPT, LLAMA_8B = "gpt:layers=32,width=4096,heads=32,seq=2048", LLAMA.format(4096, 14336, 32, 32, 128256)


@dataclass(frozen=True)
class Case:
    """A model on a cluster, ``slow`` where its nodes are joined by a slow link."""

    model: str
    cluster: str
    batch: int
    seq: int | None = None
    slow: bool = False

    def target(self) -> Cluster:
        cluster = parse_cluster(self.cluster)
        return (
            replace(cluster, name=f"{self.cluster} behind {ETHERNET.name}", network=ETHERNET) if self.slow else cluster
        )


GPT2 = "hf:gpt2"

CASES = {
    "gpt2-unlike": Case(GPT2, "4xA100+4xH100", 64, 1024),
    "gpt-unlike": Case(GPT, "4xA100+4xH100", 64),
    "gpt-slow": Case(GPT, "2x8xH100", 128, slow=True),
    "llama-8b-unlike": Case(LLAMA_8B, "4xA100+4xH100", 32, 4096),
    "llama-8b-slow": Case(LLAMA_8B, "2x8xH100", 64, 4096, slow=True),
}


def measured(case: Case) -> dict[str, Any]:
    """A row of the results."""
    resolved = resolve(case.model, batch=case.batch, seq=case.seq, dtype="bfloat16")
    graph, cluster = capture(resolved.model, resolved.args, resolved.kwargs), case.target()
    began = time.process_time()
    plan, joint = plan_jointly(graph, cluster, Options(), reference=case.model)
    seconds = time.process_time() - began
    weakest = min((node.device for node in cluster.nodes), key=lambda device: device.peak("bfloat16"))
    alike = replace(cluster, nodes=tuple(replace(node, device=weakest) for node in cluster.nodes))
    one_mesh: dict[str, float | str] = {}
    for name in ("auto", *BASELINES):
        try:
            found = plan_graph(graph, alike, Options(search=name, baselines=(), fewer_devices=False))
            one_mesh[name] = found.prediction.step_seconds
        except ShardwrightError as error:
            one_mesh[name] = error.message
    return {
        "step": plan.prediction.step_seconds,
        "bound": plan.proof.step_bound,
        "shares": {name: list(shares) for name, shares in plan.stages[0].strategy.shares.items()},
        "stages": [[len(s.ranks), len(s.strategy.recomputed), list(s.strategy.sizes)] for s in plan.stages],
        "microbatches": plan.microbatches,
        "one_mesh": one_mesh,
        "pipelines": delivered_steps(joint) if joint is not None else {},
        "cpu_seconds": seconds,
    }


def table() -> int:
    """Print the latest rows; how many are below 1.2."""
    rows, short = {row["case"]: row for row in recorded(RESULTS)}, 0
    print(
        "| case | cluster | found, s | one mesh found ÷ found | best recipe on one mesh ÷ found | equal stages ÷ found |"
    )
    print("|---|---|--:|--:|--:|--:|")
    for name, row in rows.items():
        recipes = {k: v for k, v in row["one_mesh"].items() if isinstance(v, float) and k != "auto"}
        equal = [v for k, v in row["pipelines"].items() if k in ("megatron-3d", "gpipe") and isinstance(v, float)]
        mesh = row["one_mesh"]["auto"]
        alike = [v for v in [mesh, *recipes.values(), *([] if CASES[name].slow else equal)] if isinstance(v, float)]
        short += min(alike, default=float("inf")) < 1.2 * row["step"]
        best = min(recipes, key=lambda k: recipes[k], default="none fits")
        shown = [
            f"{mesh / row['step']:.2f}" if isinstance(mesh, float) else "none fits",
            f"{recipes[best] / row['step']:.2f} ({best})" if recipes else "none fits",
            f"{min(equal) / row['step']:.2f}" if equal else "none fits",
        ]
        print(f"| {name} | {CASES[name].target().name} | {row['step']:.4f} | {' | '.join(shown)} |")
    return short


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], help="Cases; all that are not there yet otherwise")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    done = {row["case"] for row in recorded(RESULTS)}
    for name in [] if arguments.table else arguments.names or [name for name in CASES if name not in done]:
        row = {"case": name, **measured(CASES[name]), "commit": commit(), "sources": sources()}
        print(json.dumps(row), flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return table()


if __name__ == "__main__":
    raise SystemExit(main())
