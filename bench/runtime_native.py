"""Our data-parallel, FSDP and tensor-parallel programs against DDP, fully_shard and parallelize_module.

Two gloo processes train the same GPT with AdamW; engines alternate, and the median step of each is compared with its
native twin's. ``parallelize_module`` follows our tensor-parallel plan: embeddings by rows, the head tied to them by
columns, the loss on the cut logits; ``blocks only`` is the recipe that cuts nothing outside the blocks.

Peak memory is measured in processes of their own, above what a rank had once a tiny model had trained with the same
engine (so that imported libraries count for neither): the bytes in use according to malloc, which are exact, and the
resident size, which includes what malloc keeps for later. Blocks above 100 kB are given back at once
(``MALLOC_MMAP_THRESHOLD_``); ``--malloc keeps`` leaves malloc as it is, where the resident size varies from run to run.

    python bench/runtime_native.py [--layers 4 --width 256 --repeats 9] [--memory] [--adamw foreach|loop|fused]
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import statistics
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwright.runtime import parallelize
from shardwright.runtime.launch import run_locally
from shardwright.zoo.reference import resolve

PAIRS = {"data-parallel": "ddp", "fsdp": "fully_shard", "megatron": "parallelize_module"}
FURTHER = {"megatron": ("blocks only",)}
TINY = "gpt:layers=1,width=64,heads=8,vocab=256,batch=8,seq=16"


class _Mallinfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo


def in_use() -> int:
    """Bytes handed out by malloc and not given back."""
    found = _libc.mallinfo2()
    return found.uordblks + found.hblkhd


def resident(which: str = "VmRSS") -> int:
    """The resident size, or with ``VmHWM`` the highest one since it was last reset."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(which))


class Peak:
    """The most bytes in use (sampled every millisecond) and resident (counted by the kernel), above those at the start."""

    def __enter__(self) -> Peak:
        self._start, self._used = (in_use(), resident()), in_use()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets VmHWM
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._used = max(self._used, in_use())

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def bytes(self) -> tuple[int, int]:
        return self._used - self._start[0], resident("VmHWM") - self._start[1]


def native_engine(name: str, model: Any) -> torch.nn.Module:
    """The model as an expert would split it with PyTorch's own engines."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cpu",))
    if name == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        plan: dict[str, Any] = {f"attention.{part}": ColwiseParallel() for part in ("query", "key", "value")}
        plan |= {"attention.output": RowwiseParallel(), "feed.up": ColwiseParallel(), "feed.down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    if name == "parallelize_module":
        plan = {part: RowwiseParallel(input_layouts=Replicate()) for part in ("tokens", "positions")}
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh, plan)
        model.head.weight = model.tokens.weight  # parallelize_module cuts both, each by itself
    return model


def context(name: str) -> AbstractContextManager[Any]:
    """What the passes of an engine run in."""
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel() if name == "parallelize_module" else nullcontext()


def local_batch(name: str, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """DDP and FSDP are given their own part of the batch, everything else all of it."""
    if name not in ("ddp", "fully_shard"):
        return args
    return tuple(x.chunk(dist.get_world_size())[dist.get_rank()] for x in args)


def engine(name: str, reference: str, plan: Any) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    built = resolve(reference, device="cpu")
    if name in PAIRS:
        return parallelize(built.model, plan, built.args, built.kwargs), built.args
    return native_engine(name, built.model), local_batch(name, built.args)


def adam(model: torch.nn.Module, kind: str = "foreach") -> torch.optim.Optimizer:
    """AdamW over lists of tensors, in a loop or fused; plain tensors and DTensors apart: one list cannot hold both."""
    from torch.distributed.tensor import DTensor

    kinds: dict[bool, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    way: dict[str, Any] = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {}}[kind]
    return torch.optim.AdamW([{"params": group} for group in kinds.values()], **way)


def train_step(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, args: Iterable[Any]) -> Any:
    optimizer.zero_grad()
    with context(name):
        loss = model(*args)
        loss.backward()
    optimizer.step()
    return loss.detach()


def times(
    reference: str, names: tuple[str, ...], plan: Any, repeats: int, adamw: str
) -> dict[str, tuple[float, list[float]]]:
    """Per engine, the loss after the first two steps (the mean over the ranks) and the seconds of the others."""
    engines: dict[str, Any] = {}
    for name in names:
        model, args = engine(name, reference, plan)
        engines[name] = (name, model, adam(model, adamw), args)
    losses = {}
    for _ in range(2):
        for name, parts in engines.items():
            loss = train_step(*parts)
            loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss.clone()
            dist.all_reduce(loss)
            losses[name] = float(loss) / dist.get_world_size()
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats):
        for name in list(engines)[:: 1 if repeat % 2 == 0 else -1]:
            dist.barrier()
            start = time.perf_counter()
            train_step(*engines[name])
            dist.barrier()
            taken[name].append(time.perf_counter() - start)
    return {name: (losses[name], taken[name]) for name in engines}


def memory(reference: str, name: str, plans: tuple[Any, Any], adamw: str) -> tuple[int, int]:
    """The peak of three steps from the building of the model on."""

    def train(what: str, plan: Any) -> None:
        model, args = engine(name, what, plan)
        optimizer = adam(model, adamw)
        for _ in range(3):
            train_step(name, model, optimizer, args)

    train(TINY, plans[0])
    gc.collect()
    with Peak() as peak:
        train(reference, plans[1])
    return peak.bytes


def find_plan(reference: str, search: str, devices: int = 2) -> Any:
    from shardwright.planner import plan

    built = resolve(reference, device="cpu")
    cluster = f"local:{devices}"
    return plan(
        built.model, built.args, built.kwargs, cluster=cluster, search=search, baselines=(), fewer_devices=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each engine; 0: none")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--adamw", choices=("foreach", "loop", "fused"), default="foreach")
    parser.add_argument("--malloc", choices=("returns", "keeps"), default="returns")
    parser.add_argument("--only", choices=PAIRS)
    given = parser.parse_args()
    reference = (
        f"gpt:layers={given.layers},width={given.width},heads=8,vocab={given.vocab},batch={given.batch},seq={given.seq}"
    )
    print(
        f"{reference}, 2 gloo processes, torch {torch.__version__}, AdamW {given.adamw}, load {os.getloadavg()[0]:.1f}"
    )
    print(f"ratios are ours to the native engine's; steps: median of {given.repeats}, alternating")
    for ours, twin in PAIRS.items():
        if given.only not in (None, ours):
            continue
        names = (ours, twin, *FURTHER.get(ours, ()))
        plan = find_plan(reference, ours)
        if given.repeats:
            found = run_locally(functools.partial(times, reference, names, plan), 2, given.repeats, given.adamw)[0]
            mine = statistics.median(found[ours][1])
            for name in names:
                middle = statistics.median(found[name][1])
                ratio = "" if name == ours else f"ratio {mine / middle:.3f}"
                print(
                    f"{name:20s} step {middle * 1e3:9.1f} ms   second loss {found[name][0]:.6f}   {ratio}", flush=True
                )
            if os.environ.get("RUNTIME_RAW"):
                print(json.dumps(found))
        if given.memory:
            if given.malloc == "returns":
                os.environ["MALLOC_MMAP_THRESHOLD_"] = "100000"  # read by the processes that are started
            plans = (find_plan(TINY, ours), plan)
            peaks = {n: _peak(reference, n, plans, given.adamw) for n in names}
            for name, (used, held) in peaks.items():
                ratios = f"ratio {peaks[ours][0] / used:.3f}, resident {peaks[ours][1] / held:.3f}"
                ratios = "" if name == ours else ratios
                print(
                    f"{name:20s} peak {used / 2**20:6.1f} MB in use, {held / 2**20:6.1f} resident   {ratios}",
                    flush=True,
                )


def _peak(reference: str, name: str, plans: tuple[Any, Any], adamw: str) -> tuple[int, int]:
    peaks = run_locally(functools.partial(memory, reference, name), 2, plans, adamw)
    return max(used for used, _ in peaks), max(held for _, held in peaks)


if __name__ == "__main__":
    main()
