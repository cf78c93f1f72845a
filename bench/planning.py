"""How long planning takes: ``python -m bench.planning``.

Llama-70B (80 layers, every operator, loss included) on 8 × 8 H100 with meshes of up to three axes and the devices' 80 GB;
the same at 160 layers (depth should be nearly free), both also as if memory were no matter; and a mixture of experts of a
trillion parameters on 2048 × 8 H100. Times are from captured graph to plan. Found plans against baselines:
``python -m bench.planning_zoo``.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.zoo.reference import resolve

LLAMA = (
    "hf:llama:vocab_size=32000,hidden_size=8192,intermediate_size=28672,num_attention_heads=64,num_key_value_heads=8,"
    "num_hidden_layers={layers}"
)
MOE = "moe:layers=61,width=7168,heads=64,kv_heads=8,experts=384,top_k=8,inner=2048,vocab=163840"


def graph_of(reference: str, **sizes: object) -> tuple[Graph, float, float]:
    """The captured graph, the seconds that took, and the parameters in billions."""
    started = time.perf_counter()
    resolved = resolve(reference, **sizes)  # type: ignore[arg-type] # batch, seq and dtype by name
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    return graph, time.perf_counter() - started, resolved.parameter_count / 1e9


def planned(name: str, graph: Graph, cluster: str, captured: float, **options: object) -> tuple[float, float]:
    """Plan, print a row, and give the seconds by the clock and of the processors."""
    clock, processors = time.perf_counter(), time.process_time()
    chosen = Options(baselines=(), max_axes=3, fewer_devices=False, **options)  # type: ignore[arg-type] # options by name
    plan = plan_graph(graph, parse_cluster(cluster), chosen)
    seconds = time.perf_counter() - clock, time.process_time() - processors
    p = plan.prediction
    mesh = " × ".join(str(size) for _, size in plan.stages[0].strategy.axes)
    print(
        f"| {name} | {captured:.1f} | {seconds[0]:.1f} ({seconds[1]:.1f}) | {100 * plan.proof.gap:.2f} % | {mesh} "
        f"| {p.step_seconds:.3g} s | {p.memory_bytes / 1e9:.1f} GB |",
        flush=True,
    )
    return seconds


def llama(layers: int) -> list[tuple[float, float]]:
    """Plan one depth, with the devices' memory and without; the seconds by the clock and of the processors."""
    graph, captured, size = graph_of(LLAMA.format(layers=layers), batch=16, seq=2048, dtype="bfloat16")
    name = f"Llama {size:.0f} B, {layers} layers, 8x8xH100"
    limited = planned(name, graph, "8x8xH100", captured)
    return [limited, planned(f"{name}, memory ignored", graph, "8x8xH100", captured, ignore_device_memory=True)]


def mixture() -> None:
    graph, captured, size = graph_of(MOE, batch=2048, seq=4096, dtype="bfloat16")
    planned(f"mixture of experts {size:.0f} B, 2048x8xH100", graph, "2048x8xH100", captured)


def large() -> None:
    print(
        "| model | capture s | plan s (CPU s) | gap | mesh | step | memory |\n|---|---|---|---|---|---|---|", flush=True
    )
    # A process for each, so that none finds what another has priced or compiled.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
        shallow, deep = fresh.submit(llama, 80).result(), fresh.submit(llama, 160).result()
        fresh.submit(mixture).result()
    for label, few, many in zip(("80 GB a device", "memory ignored"), shallow, deep, strict=True):
        clock, processors = (many[i] / few[i] for i in range(2))
        print(f"depth 80 → 160, {label}: {clock:.2f} times the seconds ({processors:.2f} times the CPU seconds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=["large"], default="large")
    parser.parse_args()
    large()


if __name__ == "__main__":
    main()
