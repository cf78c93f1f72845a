"""Published training runs with tensor, pipeline and data parallelism: their plans by our prices, and ours beside them.

    python bench/published_3d.py [--write] [--rows 0,1,2]

Each row of ``tests/data/papers/published_3d_training.csv`` (Megatron-LM, SC 2021, table 1; Llama 3, 2024, table 4) is priced
as it was run: equal runs of blocks on ``pipeline`` stages, each a mesh of ``data`` × ``tensor`` devices with Megatron's
splits, one sequence a micro-batch and replica, 1F1B; Megatron's runs recompute every block and count that work, Llama's do
neither. Prices are datasheets', so one constant per kind of GPU (the mean ratio of published to predicted, on a log scale)
is fitted and named; the order of the rows does not depend on it. Beside it stands the fastest pipeline that the joint
search finds for the same model, devices and batch, by the same prices.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.cluster import Cluster
from shardwright.errors import Infeasible
from shardwright.graph import Graph
from shardwright.search.joint import pipelines

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from world_prices import cluster_of, graph_of, staged  # noqa: E402
from world_runs import Model, Run  # noqa: E402

DATA = ROOT / "tests" / "data" / "papers" / "published_3d_training.csv"
WRITTEN = ROOT / "bench" / "measured" / "joint" / "published_3d.json"
Row = dict[str, str]


def run_of(row: Row) -> Run:
    """The row as it was run: one sequence a micro-batch and replica, 1F1B; Megatron's runs recompute every block."""
    sizes = (int(row[key]) for key in ("layers", "hidden", "heads", "ffn", "vocabulary", "sequence"))
    model = Model(*sizes, kv_heads=0 if row["model"] == "GPT" else int(row["kv_heads"]))
    gpus, inside, tensor, stages, data, batch = (
        int(row[key]) for key in ("gpus", "gpus_per_node", "tensor", "pipeline", "data", "global_batch_sequences")
    )
    gpu = {"A100-80GB": "A100-80GB", "H100-80GB": "H100"}[row["gpu"]]
    degrees = (gpus // inside, inside, tensor, stages, data, 1, batch)
    again = "blocks" if row["model"] == "GPT" else "none"
    return Run("published", row["model"], "", model, gpu, *degrees, "bfloat16", "none", again, 0.0)


def counted_flops(row: Row) -> float:
    """What the source counts as a step's work. Megatron-LM: equation 3, with the forward pass that is computed again.
    Llama 3: six per parameter and token, and attention's products below the diagonal."""
    batch, length, layers, width = (int(row[k]) for k in ("global_batch_sequences", "sequence", "layers", "hidden"))
    if row["model"] == "GPT":
        more = 1 + length / (6 * width) + int(row["vocabulary"]) / (16 * layers * width)
        return 96 * batch * length * layers * width**2 * more
    tokens = batch * length
    return tokens * (6e9 * float(row["parameters_billion"]) + 6 * layers * width * length)


def found(row: Row, cluster: Cluster, graphs: dict[int, Graph]) -> dict[str, Any]:
    """The fastest pipeline of the joint search."""
    batch = int(row["global_batch_sequences"])
    sizes = tuple(size for size in graphs if batch % size == 0)
    try:
        best, _ = pipelines.search_pipelines(
            pipelines.Model(graphs.__getitem__, int(row["layers"])), cluster, batch=batch, microbatch_sizes=sizes
        )
    except Infeasible as error:
        return {"refused": error.message}
    widest = max(best.stages, key=lambda stage: stage.devices)
    return {
        "seconds": best.step_seconds,
        "bound": best.bound_seconds,
        "stages": len(best.stages),
        "microbatches": best.microbatches,
        "mesh": list(widest.mesh.sizes),
        "splits": sorted({stage.strategy_name for stage in best.stages}),
        "recomputed_blocks": sum(stage.recomputed_blocks for stage in best.stages),
        "lightly_blocks": sum(stage.lightly_blocks for stage in best.stages),
        "search_seconds": best.search_seconds,
    }


def priced(row: Row, search: bool) -> dict[str, Any]:
    run = run_of(row)
    cluster, data, batch = cluster_of(run), run.data, run.batch
    sizes = [size for size in ((data, 2 * data) if search else (data,)) if batch % size == 0]
    began = time.process_time()
    step, needed = staged(run)
    graphs = {size: graph_of(run.model, 4, size) for size in sizes} if search else {}
    rate = counted_flops(row) / step / int(row["gpus"]) / 1e12
    ours = {"found": found(row, cluster, graphs)} if search else {}
    fits = needed <= cluster.nodes[0].device.usable_memory
    told = {"theirs_seconds": step, "theirs_bytes": needed, "theirs_fits": fits, "predicted": rate}
    return {**told, **ours, "cpu_seconds": time.process_time() - began}


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's: of the places of the rows, ties sharing theirs."""

    def places(values: list[float]) -> np.ndarray:
        order = np.array(values)
        return np.array([(order < v).sum() + (order == v).sum() / 2 for v in values])

    return float(np.corrcoef(places(a), places(b))[0, 1])


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The fitted constants, and how far predictions are from what was published, in size and in order."""
    done = [line for line in lines if "predicted" in line]
    constants = {}
    for gpu in dict.fromkeys(line["gpu"] for line in done):
        ratios = [math.log(line["published"] / line["predicted"]) for line in done if line["gpu"] == gpu]
        constants[gpu] = math.exp(statistics.mean(ratios))
    errors = [constants[line["gpu"]] * line["predicted"] / line["published"] - 1 for line in done]
    return {
        "constants": constants,
        "mean_error": statistics.mean(map(abs, errors)),
        "worst_error": max(map(abs, errors)),
        "rank_correlation": {
            gpu: correlation(*([x[key] for x in done if x["gpu"] == gpu] for key in ("predicted", "published")))
            for gpu in constants
            if sum(x["gpu"] == gpu for x in done) > 2
        },
        "rank_correlation_all": correlation(
            [constants[x["gpu"]] * x["predicted"] for x in done], [x["published"] for x in done]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="numbers of rows, from 0; all without it")
    parser.add_argument("--theirs-only", action="store_true", help="do not search for plans of ours")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"into {WRITTEN.relative_to(ROOT)}, row by row; others stay as they are there",
    )
    asked = parser.parse_args()
    with DATA.open() as file:
        rows = list(csv.DictReader(file))
    wanted = [int(n) for n in asked.rows.split(",")] if asked.rows else range(len(rows))
    known = json.loads(WRITTEN.read_text())["rows"] if asked.write and WRITTEN.exists() else []
    lines = {line["row"]: line for line in known}
    for number in wanted:
        row = rows[number]
        line: dict[str, Any] = {"row": number, **{k: row[k] for k in ("model", "parameters_billion", "gpu", "gpus")}}
        line |= {"plan": [int(row[k]) for k in ("tensor", "context", "pipeline", "data")]}
        line["published"] = float(row["teraflops_per_gpu"])
        if int(row["context"]) > 1:
            line["left_out"] = "its context parallelism inside the attention is no recipe of ours"
        else:
            line |= priced(row, not asked.theirs_only)
        lines[number] = line
        print(json.dumps(line), flush=True)
        if asked.write:  # row by row: what was done is kept
            done = [lines[n] for n in sorted(lines)]
            WRITTEN.write_text(json.dumps({"rows": done, **summary(done)}, indent=1) + "\n")
    print(json.dumps(summary(list(lines.values())), indent=1))


if __name__ == "__main__":
    main()
