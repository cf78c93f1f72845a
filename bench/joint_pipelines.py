"""Pipelines of priced blocks beside megatron-3d, gpipe, pipedream and alpa, by the same prices; how long the search takes.

    python -m bench.joint_pipelines [NAME …] [--stages]

The model is captured with four blocks (its other blocks are alike); capture is not counted. Seconds of the search are CPU
seconds, all baselines included. The prices are sums, nothing overlaps, and H100 and A100 have never been calibrated: the
ratios between plans mean something, the absolute step times do not.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

from shardwright.cluster import parse_cluster
from shardwright.errors import Infeasible
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.search.joint.pipelines import BASELINES, JointPlan, Model, search_pipelines
from shardwright.zoo.reference import resolve


@dataclass(frozen=True)
class Case:
    model: str
    blocks: int
    cluster: str
    batch: int
    sizes: tuple[int, ...]


LLAMA_70B = "llama:layers=4,width=8192,heads=64,kv_heads=8,inner=28672,vocab=32000,seq=4096"
LLAMA_405B = "llama:layers=4,width=16384,heads=128,kv_heads=8,inner=53248,vocab=128256,seq=8192"
DEEPSEEK = "moe:layers=4,width=7168,heads=128,kv_heads=128,experts=256,top_k=8,inner=2048,vocab=129280,seq=4096"
CASES = {
    "llama-70b": Case(LLAMA_70B, 80, "8x8xH100", 256, (4, 16)),
    "llama-70b-160": Case(LLAMA_70B, 160, "8x8xH100", 256, (4, 16)),
    "llama-405b": Case(LLAMA_405B, 126, "2048x8xH100", 2048, (128, 256)),
    "deepseek-v3-like": Case(DEEPSEEK, 61, "256x8xH800", 4096, (256, 512)),
    "deep": Case("gpt:layers=4,width=2048,heads=16", 1024, "8x8xH100", 256, (8,)),
    "unlike": Case("gpt:layers=4,width=4096,heads=32", 32, "4xA100+4xH100", 64, (2, 4)),
}


def main() -> int:
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(CASES)
    print(
        "| case | cluster | batch | ours, s | bound, s | gap | " + " | ".join(f"{b} ÷ ours" for b in BASELINES), end=""
    )
    print(" | stages × micro-batches | CPU s |\n" + "|---" * (8 + len(BASELINES)) + "|", flush=True)
    worse = 0
    for name in names:
        case = CASES[name]
        graphs: dict[int, Graph] = {}
        for size in case.sizes:
            resolved = resolve(case.model, batch=size, dtype="bfloat16")
            graphs[size] = capture(resolved.model, resolved.args, resolved.kwargs)
        model, cluster = Model(graphs.__getitem__, case.blocks), parse_cluster(case.cluster)
        began = time.process_time()
        try:
            best, others = search_pipelines(
                model, cluster, batch=case.batch, microbatch_sizes=case.sizes, baselines=BASELINES
            )
        except Infeasible as error:
            print(f"| {name} | {case.cluster} | {case.batch} | {error.message} |", flush=True)
            continue
        seconds = time.process_time() - began
        ratios = []
        for plan in others.values():
            ratios.append(f"{plan.step_seconds / best.step_seconds:.3f}" if isinstance(plan, JointPlan) else "–")
            worse += isinstance(plan, JointPlan) and plan.step_seconds < best.step_seconds
        print(f"| {name} | {case.cluster} | {case.batch} | {best.step_seconds:.4f} | {best.bound_seconds:.4f} | "
              f"{100 * best.gap:.1f} % | {' | '.join(ratios)} | "
              f"{len(best.stages)} × {best.microbatches} of {best.microbatch} | "
              f"{seconds:.1f} |", flush=True)  # fmt: skip
        if not cluster.uniform:
            weakest = min((node.device for node in cluster.nodes), key=lambda device: device.peak("bfloat16"))
            nodes = tuple(replace(node, device=weakest) for node in cluster.nodes)
            alike, _ = search_pipelines(
                model, replace(cluster, nodes=nodes), batch=case.batch, microbatch_sizes=case.sizes
            )
            print(f"\n{name}: as if all devices were {weakest.name}: {alike.step_seconds:.4f} s, "
                  f"{alike.step_seconds / best.step_seconds:.2f} times ours\n", flush=True)  # fmt: skip
        if "--stages" in sys.argv:
            for stage in best.stages:
                print(f"    blocks {stage.first_block}–{stage.last_block - 1}, devices {stage.first_device}–"
                      f"{stage.first_device + stage.devices - 1} as {stage.mesh.sizes}, {stage.strategy_name}, "
                      f"{stage.recomputed_blocks} recomputed, {stage.lightly_blocks} lightly, "
                      f"holds {stage.holds}, {1e3 * stage.seconds:.1f} ms, "
                      f"{stage.memory_bytes / 2**30:.1f} GiB")  # fmt: skip
    return worse


if __name__ == "__main__":
    sys.exit(main())
