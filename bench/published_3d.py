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
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.cluster import Cluster, Mesh, mesh_of, parse_cluster, part_of
from shardwright.errors import Infeasible
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.schedules import one_f_one_b, pipeline, run
from shardwright.search.joint.blocks import BlockPricer
from shardwright.search.joint.chain import even_cuts
from shardwright.search.joint.pipelines import Model, search_pipelines
from shardwright.zoo.reference import resolve

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "papers" / "published_3d_training.csv"
WRITTEN = ROOT / "bench" / "measured" / "joint" / "published_3d.json"
Row = dict[str, str]


def model_of(row: Row) -> str:
    """The model with four of its blocks: the others are alike."""
    sizes = f"layers=4,width={row['hidden']},heads={row['heads']},inner={row['ffn']},vocab={row['vocabulary']}"
    if row["model"] == "GPT":
        return f"gpt:{sizes},seq={row['sequence']}"
    return f"llama:{sizes},kv_heads={row['kv_heads']},seq={row['sequence']}"


def counted_flops(row: Row) -> float:
    """What the source counts as a step's work. Megatron-LM: equation 3, with the forward pass that is computed again.
    Llama 3: six per parameter and token, and attention's products below the diagonal."""
    batch, length, layers, width = (int(row[k]) for k in ("global_batch_sequences", "sequence", "layers", "hidden"))
    if row["model"] == "GPT":
        more = 1 + length / (6 * width) + int(row["vocabulary"]) / (16 * layers * width)
        return 96 * batch * length * layers * width**2 * more
    tokens = batch * length
    return tokens * (6e9 * float(row["parameters_billion"]) + 6 * layers * width * length)


def stage_mesh(cluster: Cluster, data: int, tensor: int) -> Mesh:
    """``data`` × ``tensor`` devices, the tensor axis last, inside nodes."""
    part = part_of(cluster, range(data * tensor))
    inside = part.nodes[0].devices
    if tensor == inside or tensor == 1:
        return mesh_of(part)
    mesh = mesh_of(part, (len(part.nodes), *sorted((inside // tensor, tensor))))
    outer, one, other = mesh.axes
    return replace(mesh, axes=(outer, replace(one, size=inside // tensor), replace(other, size=tensor)))


def graph_of(row: Row, size: int) -> Graph:
    resolved = resolve(model_of(row), batch=size, dtype="bfloat16")
    return capture(resolved.model, resolved.args, resolved.kwargs)


def theirs(row: Row, cluster: Cluster, graph: Graph) -> tuple[float, float]:
    """Seconds of the published plan by our prices, and bytes of its fullest stage by our count, with every parameter's
    state on every replica (Llama's runs shard it)."""
    stages, data, tensor = (int(row[key]) for key in ("pipeline", "data", "tensor"))
    count = int(row["global_batch_sequences"]) // data
    pricer, mesh = BlockPricer(graph), stage_mesh(cluster, data, tensor)
    name = "megatron" if tensor > 1 else "data-parallel"
    price = next(p for p in pricer.prices(mesh, count, (name,)) if p.name == name)
    again = row["model"] == "GPT"  # every block
    cuts = even_cuts(int(row["layers"]), stages)
    blocks, number = np.diff(cuts), np.arange(stages)
    network = cluster.network.per_device(cluster.nodes[0].devices)
    hop = network.latency + pricer.boundary_bytes / mesh.devices / network.bandwidth
    seconds = price.seconds.of(blocks, number == 0, number == stages - 1) + again * blocks * price.wholly.seconds
    closing = price.closing.of(blocks, number == 0, number == stages - 1)
    chain = pipeline(
        range(stages), count, forward=seconds / 3, inputs=2 * seconds / 3, weights=0.0, hop=hop if stages > 1 else 0.0
    )
    timing = run(one_f_one_b(stages, count), chain)
    held = price.held.of(blocks, number == 0, number == stages - 1) - again * blocks * price.wholly.saves
    needed = price.resting.of(blocks, number == 0, number == stages - 1) + held * np.minimum(stages - number, count)
    needed = needed + again * price.held.block  # of the one that is computed again
    step = max(float(ends[-1]) + float(more) for ends, more in zip(timing.ends, closing, strict=True))
    return step, float(needed.max())


def found(row: Row, cluster: Cluster, graphs: dict[int, Graph]) -> dict[str, Any]:
    """The fastest pipeline of the joint search."""
    batch = int(row["global_batch_sequences"])
    sizes = tuple(size for size in graphs if batch % size == 0)
    try:
        best, _ = search_pipelines(
            Model(graphs.__getitem__, int(row["layers"])), cluster, batch=batch, microbatch_sizes=sizes
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
    gpu = {"A100-80GB": "A100-80GB", "H100-80GB": "H100"}[row["gpu"]]
    cluster = parse_cluster(f"{int(row['gpus']) // int(row['gpus_per_node'])}x{row['gpus_per_node']}x{gpu}")
    data, batch = int(row["data"]), int(row["global_batch_sequences"])
    sizes = [size for size in ((data, 2 * data) if search else (data,)) if batch % size == 0]
    began = time.process_time()
    graphs = {size: graph_of(row, size) for size in sizes}
    step, needed = theirs(row, cluster, graphs[data])
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
