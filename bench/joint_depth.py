"""What depth costs the whole search: Llama 70B with 80 and with 160 layers, a GPT of 1,000 (the zoo allows no more) and
Mixtral 8×22B, through the planner.

    python -m bench.joint_depth [NAME …]

Each is planned as ``shardwright plan --stages auto`` does it, with its defaults, on 64 H100; seconds are CPU seconds of one
process from the captured graph to the plan, baselines included (kernels compiled before: a small model is planned first).
Every row is a line of ``bench/measured/joint/depth.jsonl``, with the commit and a digest of the sources.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from bench.never_worse import LLAMA, MODELS
from bench.runtime_verify import commit, sources
from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_jointly
from shardwright.zoo.reference import resolve

RESULTS = Path(__file__).parent / "measured" / "joint" / "depth.jsonl"
GPT = "gpt:layers={},width=2048,heads=16"
CASES = {  # reference, positions
    "llama-70b": (LLAMA.format(8192, 28672, 64, 80, 32000), 4096),
    "llama-70b-160": (LLAMA.format(8192, 28672, 64, 160, 32000), 4096),
    "gpt-1000": (GPT.format(1000), None),
    "mixtral": (MODELS["mixtral-8x22b"][0], 4096),
}


def graph_of(reference: str, positions: int | None) -> Graph:
    resolved = resolve(reference, batch=256, seq=positions, dtype="bfloat16")
    return capture(resolved.model, resolved.args, resolved.kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="Cases; all otherwise")
    cluster = parse_cluster("8x8xH100")
    plan_jointly(graph_of(GPT.format(4), None), cluster, Options())
    for name in parser.parse_args().names or CASES:
        graph = graph_of(*CASES[name])
        began, wall, said = time.process_time(), time.perf_counter(), list[tuple[str, float]]()

        def say(text: str, began: float = began, said: list[tuple[str, float]] = said) -> None:
            said.append((text, round(time.process_time() - began, 2)))

        plan, joint = plan_jointly(graph, cluster, Options(), progress=say)
        row = {
            "case": name,
            "operators": len(graph.ops),
            "cpu_seconds": time.process_time() - began,
            "wall_seconds": time.perf_counter() - wall,
            "step": plan.prediction.step_seconds,
            "bound": plan.proof.step_bound,
            "stages": [[len(s.ranks), len(s.strategy.recomputed), list(s.strategy.sizes)] for s in plan.stages],
            "mesh": None if not plan.whole else [size for _, size in plan.stages[0].strategy.axes],
            "recomputed": len(plan.stages[0].strategy.recomputed),
            "microbatches": plan.microbatches,
            "said": [one for one in said if "pipeline" in one[0]],
            "pipelines_seconds": joint.best.search_seconds if joint is not None else None,
            "commit": commit(),
            "sources": sources(),
        }
        print(json.dumps(row), flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
