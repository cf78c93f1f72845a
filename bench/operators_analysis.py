"""Claim: describing and analysing every operator of an 80-layer Llama takes under 2 s; repeated operators are analysed once.

Prints seconds for the graph with the cache cold and warm, and without sharing between equal operators (the reference).
Run: python bench/operators_analysis.py [layers]
"""

from __future__ import annotations

import sys
import time

from shardwright.frontend import capture
from shardwright.operators.deriving import analyse, derived, forget
from shardwright.zoo.reference import resolve


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(layers: int = 80) -> None:
    reference = f"llama:layers={layers},width=8192,heads=64,kv_heads=8,inner=28672,vocab=32000"
    found = resolve(reference, batch=8, seq=2048)
    graph = capture(found.model, found.args, found.kwargs)
    forget()
    cold = seconds(lambda: [analyse(op, graph.tensors) for op in graph.ops])
    warm = min(seconds(lambda: [analyse(op, graph.tensors) for op in graph.ops]) for _ in range(3))
    apart = seconds(lambda: [derived(op, graph.tensors) for op in graph.ops])
    distinct = len({id(analyse(op, graph.tensors)) for op in graph.ops})
    print(f"{reference}: {len(graph.ops)} operators, {distinct} distinct")
    print(f"{'':24}{'seconds':>10}{'ratio':>8}")
    for name, value in (("each on its own", apart), ("equal ones once, cold", cold), ("equal ones once, warm", warm)):
        print(f"{name:24}{value:10.4f}{value / apart:8.4f}")
    if cold >= 2.0:
        sys.exit(f"the claim fails: {cold:.2f} s")


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
