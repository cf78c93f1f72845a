"""Pipelines that the joint search finds, run on four processes against one: loss and every gradient, in float64.

    python -m bench.found_pipelines [MODEL …]      # runs what the results lack
    python -m bench.found_pipelines --table

Per model (small, four blocks) the two fastest unlike pipelines of several stages on all of ``2x2xH100``, among those that
the search finds with all memory and with seven tenths of what the fastest takes and its recipes', are delivered as plans,
read back from their files and run on four gloo processes. The figure is the largest difference of the loss or of any
gradient on any rank. Every run is a line of ``bench/measured/joint/found_pipelines.jsonl``, with the commit and a digest of
the sources.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # last: the tests have a folder of the same name as this one

from bench.runtime_verify import commit, recorded, sources  # noqa: E402 - after the path of the tests' helpers
from runtime.pool import Pool  # noqa: E402
from runtime.test_found_pipelines import compared  # noqa: E402
from runtime.workers import built  # noqa: E402
from shardwright.cluster import parse_cluster  # noqa: E402
from shardwright.errors import LoweringError, ShardwrightError  # noqa: E402
from shardwright.planner import Options  # noqa: E402
from shardwright.planner.joint import find_pipelines  # noqa: E402
from shardwright.search.joint.pipelines import JointPlan  # noqa: E402

RESULTS = ROOT / "bench" / "measured" / "joint" / "found_pipelines.jsonl"
CLUSTER = "2x2xH100"
SHARE = 0.7
LIMIT = 1e-10
MODELS = [
    "llama:small,layers=4",
    "gpt:small,layers=4",
    "bert:small,layers=4",
    "moe:small,layers=4",
    "hf:gpt2:small,n_layer=4",
    "hf:vit:small,num_hidden_layers=4",
    "hf:llama:small,num_hidden_layers=4",
]


def found(reference: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Plans as files, and what they are."""
    joint = find_pipelines(built(reference)[3], parse_cluster(CLUSTER), Options())
    plans = [joint.best, *(plan for plan in joint.recipes.values() if isinstance(plan, JointPlan))]
    plans += joint.under([SHARE * max(stage.memory_bytes for stage in joint.best.stages)])
    shapes = {
        str([(s.devices, s.recomputed_blocks, s.lightly_blocks) for s in plan.stages]): plan for plan in reversed(plans)
    }
    files = {}
    staged = sorted((plan for plan in shapes.values() if len(plan.stages) > 1), key=lambda plan: plan.step_seconds)
    for number, plan in enumerate(plan for plan in staged if sum(s.devices for s in plan.stages) == 4):
        path = folder / f"{number}.json"
        try:
            joint.deliver(plan).save(path)
        except LoweringError:  # stages on unlike meshes share a parameter
            continue
        if len(files) == 2:
            break
        stages = [
            {
                "blocks": [s.first_block, s.last_block],
                "mesh": list(s.mesh.sizes),
                "strategy": s.strategy_name,
                "recomputed": s.recomputed_blocks,
                "lightly": s.lightly_blocks,
            }
            for s in plan.stages
        ]
        files[str(path)] = {"stages": stages, "microbatches": plan.microbatches, "schedule": plan.schedule}
    return files


def main() -> int:
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or MODELS
    rows = recorded(RESULTS)
    done = {row["model"] for row in rows if row["agrees"]}
    pool: Pool | None = None
    for model in () if "--table" in sys.argv else names:
        if model in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                files = found(model, Path(folder))
                pool = pool or Pool(4)
                worst = pool.run(compared, model, list(files), seconds=400)
                results = [files[path] | {"difference": max(each[path] for each in worst)} for path in files]
            except (ShardwrightError, AssertionError) as error:
                results = [{"failed": str(error).splitlines()[-1][:300]}]
        for result in results:
            row = {"model": model, **result, "agrees": result.get("difference", 1.0) <= LIMIT}
            rows.append(row)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row | {"commit": commit(), "sources": sources()}) + "\n")
            print(json.dumps(row), flush=True)
    if pool is not None:
        pool.close()
    print("| model | stages | micro-batches | largest difference |\n|---|---|--:|--:|")
    for row in rows:
        shape = " + ".join(
            f"{s['blocks'][1] - s['blocks'][0]} blocks on {'×'.join(map(str, s['mesh']))} ({s['strategy']}"
            f"{', ' + str(s['recomputed']) + ' recomputed' if s['recomputed'] else ''})"
            for s in row.get("stages", ())
        )
        print(
            f"| {row['model']} | {shape or row.get('failed', '')} | {row.get('microbatches', '')} | "
            f"{row.get('difference', float('nan')):.1e} |"
        )
    return sum(not row["agrees"] for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
