"""Our data-parallel, FSDP and tensor-parallel programs against DDP, fully_shard and parallelize_module.

Two gloo processes train the same GPT with AdamW; engines alternate, and the median step of each is compared with its
native twin's. Peak memory is the highest resident size of a rank above what it had before the engine was built, measured
in processes of their own.

    python bench/runtime_native.py [--layers 4 --width 256 --repeats 9] [--memory]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwright.runtime import parallelize
from shardwright.runtime.launch import run_locally
from shardwright.zoo.reference import resolve

PAIRS = {"data-parallel": "ddp", "fsdp": "fully_shard", "megatron": "parallelize_module"}


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The highest resident size while the context is open, sampled every two milliseconds."""

    def __enter__(self) -> Peak:
        self.start = self.highest = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.highest = max(self.highest, resident())

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.highest - self.start


def native(name: str, model: torch.nn.Module) -> torch.nn.Module:
    """The model as an expert would split it with PyTorch's own engines."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cpu",))
    if name == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        plan = {f"attention.{part}": ColwiseParallel() for part in ("query", "key", "value")}
        plan |= {"attention.output": RowwiseParallel(), "feed.up": ColwiseParallel(), "feed.down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def local_batch(name: str, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """DDP and FSDP are given their own part of the batch, tensor parallelism all of it."""
    if name == "parallelize_module":
        return args
    return tuple(x.chunk(dist.get_world_size())[dist.get_rank()] for x in args)


def engine(name: str, reference: str, plan: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    built = resolve(reference, device="cpu")
    if name in PAIRS:
        return parallelize(built.model, plan, built.args, built.kwargs), built.args
    return native(name, built.model), local_batch(name, built.args)


def optimiser(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW over lists of tensors; plain tensors and DTensors apart, because one list cannot hold both."""
    from torch.distributed.tensor import DTensor

    kinds: dict[bool, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in kinds.values()], foreach=True)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, args: tuple[torch.Tensor, ...]) -> float:
    dist.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    model(*args).backward()
    optimizer.step()
    dist.barrier()
    return time.perf_counter() - start


def times(reference: str, ours: str, plan: Any, repeats: int) -> dict[str, list[float]]:
    engines = {}
    for name in (ours, PAIRS[ours]):
        model, args = engine(name, reference, plan)
        engines[name] = (model, optimiser(model), args)
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(2):
        for parts in engines.values():
            step(*parts)
    for repeat in range(repeats):
        order = list(engines) if repeat % 2 == 0 else list(engines)[::-1]
        for name in order:
            taken[name].append(step(*engines[name]))
    return taken


def memory(reference: str, name: str, plan: Any) -> int:
    with Peak() as peak:
        model, args = engine(name, reference, plan)
        optimizer = optimiser(model)
        for _ in range(3):
            step(model, optimizer, args)
    return peak.bytes


def find_plan(reference: str, search: str) -> Any:
    from shardwright.planner import plan

    built = resolve(reference, device="cpu")
    return plan(
        built.model, built.args, built.kwargs, cluster="local:2", search=search, baselines=(), fewer_devices=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--only", choices=PAIRS)
    given = parser.parse_args()
    reference = (
        f"gpt:layers={given.layers},width={given.width},heads=8,vocab={given.vocab},batch={given.batch},seq={given.seq}"
    )
    print(f"{reference}, 2 gloo processes, torch {torch.__version__}, median of {given.repeats} alternating steps")
    print(f"{'ours':14s} {'native':20s} {'ours ms':>9s} {'native ms':>9s} {'ratio':>6s} {'memory ratio':>13s}")
    for ours, twin in PAIRS.items():
        if given.only not in (None, ours):
            continue
        plan = find_plan(reference, ours)
        taken = run_locally(functools.partial(times, reference, ours, plan), 2, given.repeats)[0]
        mine, theirs = (statistics.median(taken[name]) for name in (ours, twin))
        ratio = "not measured"
        if given.memory:
            peaks = {n: max(run_locally(functools.partial(memory, reference, n), 2, plan)) for n in (ours, twin)}
            ratio = f"{peaks[ours] / peaks[twin]:.3f} ({peaks[ours] >> 20}/{peaks[twin] >> 20} MB)"
        print(
            f"{ours:14s} {twin:20s} {mine * 1e3:9.1f} {theirs * 1e3:9.1f} {mine / theirs:6.3f} {ratio:>13s}", flush=True
        )
        if os.environ.get("RUNTIME_RAW"):
            print(json.dumps(taken))


if __name__ == "__main__":
    main()
