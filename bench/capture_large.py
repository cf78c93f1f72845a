"""Capture of a 70-billion-parameter Llama (80 layers, loss included) on meta: under 30 seconds and 1.5 GB.

Each measurement runs in a fresh process, imports included in its memory but not in its time. Processor seconds are
given beside the clock, because tracing runs on one core and a busy machine stretches only the latter. The reference
is what nobody can avoid: ``torch.export`` of the same model by itself, in the same run.

    python bench/capture_large.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

MODEL = (
    "hf:llama:num_hidden_layers=80,hidden_size=8192,num_attention_heads=64,num_key_value_heads=8,"
    "intermediate_size=28672,max_position_embeddings=4096"
)

MEASURE = """
import json, resource, sys, time
import torch
from shardwright.frontend import capture
from shardwright.zoo.reference import resolve
resolved = resolve(sys.argv[2], batch=8, seq=4096, dtype="bfloat16")
started, processor = time.perf_counter(), time.process_time()
if sys.argv[1] == "capture":
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    size = len(graph.ops)
else:
    program = torch.export.export(resolved.model, resolved.args, resolved.kwargs, strict=False)
    size = len(program.graph.nodes)
seconds, processor = time.perf_counter() - started, time.process_time() - processor
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"parameters": resolved.parameter_count, "seconds": seconds, "processor": processor,
                  "bytes": peak, "size": size}))
"""


def measure(kind: str) -> dict[str, float]:
    """One measurement in its own process."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, kind, MODEL], capture_output=True, text=True, check=True, timeout=600
    )
    return json.loads(run.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    rows = {kind: [measure(kind) for _ in range(repeats)] for kind in ("export", "capture")}
    reference = min(row["processor"] for row in rows["export"])
    print(f"{rows['capture'][0]['parameters']:,} parameters, {repeats} runs each, the fastest and the largest")
    print(f"{'':<22} {'seconds':>8} {'CPU s':>7} {'ratio':>6} {'peak GB':>8} {'operators':>9}")
    for kind, name in (("export", "torch.export alone"), ("capture", "shardwright capture")):
        seconds = min(row["seconds"] for row in rows[kind])
        processor = min(row["processor"] for row in rows[kind])
        peak = max(row["bytes"] for row in rows[kind]) / 1e9
        ratio = processor / reference
        print(f"{name:<22} {seconds:>8.1f} {processor:>7.1f} {ratio:>6.2f} {peak:>8.2f} {rows[kind][0]['size']:>9}")
    fast = min(row["seconds"] for row in rows["capture"]) < 30
    small = max(row["bytes"] for row in rows["capture"]) < 1.5e9
    print(f"under 30 s: {'yes' if fast else 'NO'}; under 1.5 GB: {'yes' if small else 'NO'}")


if __name__ == "__main__":
    main()
