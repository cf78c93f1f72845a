"""How long it takes to simulate one step of an 80-layer Llama with its memory, beside pricing every operator on its own.

python bench/simulator_speed.py [layers]
"""

from __future__ import annotations

import sys
import time

import torch

from shardwright import zoo
from shardwright.cluster import mesh_of, parse_cluster
from shardwright.costs.compute import op_times
from shardwright.frontend import capture
from shardwright.operators import analyse
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.simulator import simulate


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 80
    with torch.device("meta"):
        model, args, kwargs = zoo.build(
            "llama", layers=layers, width=8192, heads=64, kv_heads=8, inner=28672, vocab=128256, batch=64, seq=4096
        )
    graph = capture(model.to(torch.bfloat16), args, kwargs)
    mesh = mesh_of(parse_cluster("8x8xH200"), (8, 8))
    print(f"Llama of {layers} layers, {len(graph.ops):,} operators, mesh 8 x 8")
    print(f"{'search':<15}{'events':>8}{'first':>9}{'again':>9}{'memory':>9}{'each priced':>13}{'ratio':>8}")
    for search in ("data-parallel", "fsdp", "megatron"):
        formulation = formulate(graph, mesh, within=restriction(search, 2))
        strategy = formulation.strategy(solve(formulation.problem, time_limit=30).answer)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            timeline = simulate(graph, strategy, mesh)
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        timeline.peak_bytes  # noqa: B018 - computed on first use
        memory = time.perf_counter() - began
        began = time.perf_counter()
        for op in graph.ops:
            op_times(op, analyse(op, graph.tensors), graph.tensors, [strategy.splits[op.name]], mesh)
        each = time.perf_counter() - began
        again = min(seconds[1:])
        print(
            f"{search:<15}{len(timeline.ranks[0].events):>8,}{seconds[0]:>8.2f}s{again:>8.2f}s{memory:>8.2f}s"
            f"{each:>12.2f}s{(again + memory) / each:>7.2f}x"
        )


if __name__ == "__main__":
    main()
