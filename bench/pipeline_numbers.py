"""Pipelines against one process: loss and every gradient, in float64, for every known schedule and for splits inside stages.

    python bench/pipeline_numbers.py [MODEL ...]

Four gloo processes; every model in its small size, cut into equal runs of operators. The figure is the largest absolute
difference on any rank, in any plan.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

MODELS = ["gpt:small", "llama:small", "bert:small", "transformer:small", "alexnet:small"]
MODELS += [f"hf:{name}:small" for name in ("gpt2", "llama", "bert", "t5", "vit", "clip_vision_model")]
Job = tuple[int, int, str, int, int | None, int | None]
JOBS: list[Job] = [
    # stages, micro-batches, schedule, ranks of a stage, the seed of its splits, ranks that hold several stages
    (4, 4, "1f1b", 1, None, None),
    (4, 2, "gpipe", 1, None, None),
    (4, 3, "zb-h1", 1, None, None),
    (4, 4, "zb-h2", 1, None, None),
    (8, 4, "interleaved-1f1b", 1, None, 4),
    (8, 4, "breadth-first", 1, None, 4),
    (8, 4, "zb-v", 1, None, None),
    (8, 4, "v-half", 1, None, None),
    (8, 4, "v-min", 1, None, None),
    (8, 4, "dualpipe-v", 1, None, None),
    (2, 2, "1f1b", 2, 1, None),
    (2, 2, "zb-h1", 2, 3, None),
]


def differences(rank: int, reference: str) -> list[float]:
    """Per job, the largest difference on this rank."""
    from runtime.pipelines import halves, pipeline_plan, whole
    from runtime.workers import built
    from shardwright.runtime import parallelize
    from shardwright.verification.precision import all_double
    from shardwright.verification.recorded import loss_of

    model, args, kwargs, graph = built(reference)
    alone = copy.deepcopy(model)
    with all_double(True):
        loss = loss_of(alone(*args, **kwargs))
        loss.backward()
    wanted = {name: p.grad for name, p in alone.named_parameters(remove_duplicate=False)}
    found = []
    for stages, microbatches, schedule, each, seed, devices in JOBS:
        plan = pipeline_plan(graph, halves(graph, stages), microbatches, schedule, each, seed, devices)
        parallel = parallelize(copy.deepcopy(model), plan, args, kwargs, graph=graph)
        mine = loss_of(parallel(*args, **kwargs))
        mine.backward()
        pairs = [(whole(p.grad), wanted[name]) for name, p in parallel.named_parameters() if wanted[name] is not None]
        found.append(max([(mine - loss).abs().item(), *((a - b).abs().max().item() for a, b in pairs)]))
    return found


def main() -> None:
    from runtime.pool import POOL

    for reference in sys.argv[1:] or MODELS:
        ranks = POOL.run(differences, reference, seconds=600)
        worst = [max(column) for column in zip(*ranks, strict=True)]
        names = ", ".join(f"{job[2]} {value:.0e}" for job, value in zip(JOBS, worst, strict=True))
        print(f"{reference}: worst {max(worst):.1e} of {len(worst)} plans ({names})", flush=True)


if __name__ == "__main__":
    main()
