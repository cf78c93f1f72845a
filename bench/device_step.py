"""One rank of eight on a GPU: our programs beside one device by itself and ``fully_shard``, in one run.

    python bench/device_step.py [--model gpt2|llama] [--rounds 5]

Collectives are PyTorch's fake ones (they return at once), so this shows what one rank computes and what its host does, not
the network. Host seconds are those until everything of a step is issued, step seconds those until the device has done it;
memory is the peak above what rests between steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # the only way to this backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize
from shardwright.zoo.reference import resolve

RANKS = 8
MODELS = {"gpt2": ("gpt", 8, 1024), "llama": ("llama:layers=4,vocab=32000", 2, 2048)}


def built(name: str, ranks: int, device: str) -> Any:
    reference, rows, length = MODELS[name]
    return resolve(reference, batch=rows * ranks, seq=length, dtype="bfloat16", device=device)


def step_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(*args, **kwargs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def engines(name: str, device: str) -> dict[str, Callable[[], Callable[[], None]]]:
    def alone() -> Callable[[], None]:
        one = built(name, 1, device)
        return step_of(one.model, one.args, one.kwargs)

    def native() -> Callable[[], None]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        one = built(name, 1, device)
        mesh = init_device_mesh("cuda" if device == "cuda" else "cpu", (RANKS,))
        for block in one.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(one.model, mesh=mesh)
        return step_of(one.model, one.args, one.kwargs)

    def ours(search: str) -> Callable[[], Callable[[], None]]:
        def make() -> Callable[[], None]:
            whole = built(name, RANKS, device)
            graph = capture(whole.model, whole.args, whole.kwargs)
            options = Options(search=search, baselines=(), fewer_devices=False, ignore_device_memory=True)
            plan = plan_graph(graph, parse_cluster("8xH200"), options)
            parallel = parallelize(whole.model, plan, graph=graph, device=device)
            return step_of(parallel, whole.args, whole.kwargs)

        return make

    return {
        "one device": alone,
        "fully_shard": native,
        "our fsdp": ours("fsdp"),
        "our data-parallel": ours("data-parallel"),
    }


def timed(step: Callable[[], None], device: str, steps: int) -> tuple[float, float]:
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    sync()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    issued = time.perf_counter()
    sync()
    return (issued - begun) / steps, (time.perf_counter() - begun) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--raw", help="write every figure here")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    figures: dict[str, list[tuple[float, float]]] = {}
    above: dict[str, float] = {}
    for name, make in engines(given.model, device).items():
        try:
            step = make()
            for _ in range(8):  # operators are traced after the third pass
                step()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        if device == "cuda":
            torch.cuda.synchronize()
            resting = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            above[name] = (torch.cuda.max_memory_allocated() - resting) / 2**30
        figures[name] = [timed(step, device, given.steps) for _ in range(given.rounds)]
        del step
        if device == "cuda":
            torch.cuda.empty_cache()
        host, whole = (1e3 * statistics.median(column) for column in zip(*figures[name], strict=True))
        print(
            f"{given.model} {name}: {whole:.1f} ms a step, host {host:.1f} ms, {above.get(name, 0):.2f} GiB", flush=True
        )
    if given.raw:
        Path(given.raw).write_text(json.dumps({"model": given.model, "figures": figures, "above_gib": above}))


if __name__ == "__main__":
    main()
