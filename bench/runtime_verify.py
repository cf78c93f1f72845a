"""Every model and every strategy that applies, on local processes, against the eager model on one.

The same comparison as `shardwright verify` (three AdamW steps; loss, gradients, parameters, buffers), for many models with
one start of the processes. Prints one line per model and strategy: largest relative difference of a gradient, verdict.

    python bench/runtime_verify.py --processes 2 [--dtype float64] [--models gpt:small hf:llama:small]
"""

from __future__ import annotations

import argparse
import functools
import time

import torch.distributed as dist

from shardwright.errors import Infeasible, ShardwrightError
from shardwright.runtime.launch import run_locally
from shardwright.zoo.reference import resolve

ZOO = ("gpt", "alexnet", "llama", "bert", "transformer", "rnnlm", "rnn", "moe", "wresnet50", "inception")
HUGGING_FACE = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "resnet")
MODELS = [f"{name}:small" for name in ZOO] + [f"hf:{name}:small" for name in HUGGING_FACE]
SEARCHES = ("auto", "data-parallel", "fsdp", "megatron", "megatron-sp", "one-weird-trick")


def build(reference: str):
    resolved = resolve(reference, device="cpu")
    return resolved.model, resolved.args, resolved.kwargs


def verify_all(models: list[str], searches: list[str], double: bool, steps: int, cluster: str) -> list[str]:
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph
    from shardwright.runtime.precision import all_double
    from shardwright.runtime.verify import check, prepared

    lines = []
    for reference in models:
        try:
            model, args, kwargs = prepared(functools.partial(build, reference), double)
            with all_double(double):
                graph = capture(model, args, kwargs)
        except ShardwrightError as error:
            lines.append(f"{reference:20s} {'':16s} cannot be captured: {error.message}"[:160])
            if dist.get_rank() == 0:
                print(lines[-1], flush=True)
            continue
        for search in searches:
            started = time.perf_counter()
            box = [None]
            if dist.get_rank() == 0:
                try:
                    options = Options(search=search, baselines=(), fewer_devices=False, time_limit=20.0)
                    box = [plan_graph(graph, parse_cluster(cluster), options)]
                except Infeasible as error:
                    box = [error.message]
            dist.broadcast_object_list(box)
            if isinstance(box[0], str):
                text = f"does not apply: {box[0]}"
            else:
                answer = check(model, tuple(args), kwargs, box[0], steps=steps, graph=graph)
                if answer is None:
                    continue
                worst = {what: answer.worst(what) for what in ("loss", "gradient", "parameter", "buffer")}
                numbers = " ".join(f"{what} {item.relative:.1e}" for what, item in worst.items() if item is not None)
                text = f"{'agrees' if answer.agrees else 'DIFFERS'}  {numbers}  ({len(answer.comparisons)} tensors, "
                text += f"{time.perf_counter() - started:.0f} s)"
            if dist.get_rank() == 0:
                lines.append(f"{reference:20s} {search:16s} {text}"[:170])
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--searches", nargs="*", default=list(SEARCHES))
    given = parser.parse_args()
    cluster = f"local:{given.processes}"
    print(f"{given.processes} processes, {given.dtype}, {given.steps} AdamW steps")
    double = given.dtype == "float64"
    lines = run_locally(
        verify_all, given.processes, given.models, given.searches, double, given.steps, cluster, seconds=7200
    )[0]
    wrong = [line for line in lines if "DIFFERS" in line]
    print(f"{sum('agrees' in line for line in lines)} agree, {len(wrong)} differ")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
