"""How much faster a plan is that recomputes no more blocks than memory asks for: ``python -m bench.recomputed_blocks``.

Llama 8B on 8 H100 with batches that do not fit without recomputing: all blocks (``--recompute light``, ``blocks``) beside as
many of them, wholly or lightly, as there is no room for (the default).
"""

from __future__ import annotations

import time

from shardwright.cluster import parse_cluster
from shardwright.errors import Infeasible
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.zoo.reference import resolve

LLAMA = (
    "hf:llama:vocab_size=32000,hidden_size=4096,intermediate_size=14336,num_attention_heads=32,num_key_value_heads=8,"
    "num_hidden_layers=32"
)
BATCHES = (32, 64)


def main() -> None:
    print("| batch | recompute | blocks wholly, lightly | step | memory | plan CPU s |\n|--:|---|--:|--:|--:|--:|")
    for batch in BATCHES:
        model = resolve(LLAMA, batch=batch, seq=4096, dtype="bfloat16")
        graph = capture(model.model, model.args, model.kwargs)
        for way in ("light", "blocks", "auto"):
            begun = time.process_time()
            options = Options(baselines=(), fewer_devices=False, max_axes=1, recompute=way)
            try:
                plan = plan_graph(graph, parse_cluster("8xH100"), options)
            except Infeasible:
                print(f"| {batch} | {way} | | does not fit | | {time.process_time() - begun:.1f} |", flush=True)
                continue
            strategy, told = plan.stages[0].strategy, plan.prediction
            light = len(strategy.lightly)
            print(
                f"| {batch} | {way} | {len(strategy.recomputed) - light}, {light} | {told.step_seconds:.4f} s "
                f"| {told.memory_bytes / 1e9:.1f} GB | {time.process_time() - begun:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
