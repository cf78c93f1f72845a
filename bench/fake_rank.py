"""What the benchmarks of one rank share: a fake process group whose numbers are defined, real inputs, fair timing.

Collectives of PyTorch's fake group return at once. What they leave in their results differs by version: 2.13 copies this
rank's own numbers, 2.11 leaves whatever the memory held where tensors are scattered or exchanged. Here a rank gets its own
piece of what is scattered (a device is faster on what is no number), and zeros where integers are exchanged, which may be
indices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist


def join_fake_group(world: int, rank: int = 0) -> None:
    """Be ``rank`` of ``world`` processes of which no other exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the only way to this backend

    from shardwright.lowering import collectives
    from shardwright.runtime import bundles

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    scatter, exchange = collectives.start_scattering, collectives.exchanged

    def scattered(x: torch.Tensor, reduce: str, ranks: int, group: str) -> Any:
        pending = scatter(x, reduce, ranks, group)
        if pending.work is not None:
            pending.result.copy_(x.narrow(0, rank * len(pending.result), len(pending.result)))
        return pending

    def exchanged(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        arrived = exchange(x, *rest)
        return arrived if x.is_floating_point() else torch.zeros_like(arrived)

    collectives.start_scattering = bundles.start_scattering = scattered
    collectives.exchanged = exchanged


def inputs_of(
    reference: str, *, batch: int | None, seq: int | None, dtype: str, device: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The zoo's own inputs (every index within its table) on a device, without giving the model any memory."""
    from shardwright._torch_compat import map_tree
    from shardwright.runtime.materialise import parameters_on_meta
    from shardwright.zoo.reference import resolve

    with parameters_on_meta():
        built = resolve(reference, batch=batch, seq=seq, device="cpu", dtype=dtype)

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return map_tree(there, built.args), map_tree(there, built.kwargs)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], device: str, steps: int) -> tuple[float, float]:
    """Wall seconds per step and, of these, until the host had issued everything."""
    synchronise(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    issued = time.perf_counter() - began
    synchronise(device)
    return (time.perf_counter() - began) / steps, issued / steps


def alternating(
    programs: Mapping[str, Callable[[], object]], device: str, *, repeats: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Programs in turn, the order turned round every time; medians and all samples of each."""
    walls: dict[str, list[float]] = {name: [] for name in programs}
    hosts: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats):
        for name in list(programs) if repeat % 2 == 0 else list(programs)[::-1]:
            wall, host = timed(programs[name], device, steps)
            walls[name].append(wall)
            hosts[name].append(host)
    return {
        name: {
            "seconds": statistics.median(walls[name]),
            "host_seconds": statistics.median(hosts[name]),
            "walls": walls[name],
        }
        for name in programs
    }


def peak_bytes(step: Callable[[], object], before: int, device: str) -> int | None:
    """The allocator's peak of one step above what was allocated ``before`` the program was built; CUDA only."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def reserved_bytes(step: Callable[[], object], before: int, device: str) -> int | None:
    """As :func:`peak_bytes`, of what is reserved from the device: what CUDA graphs keep for themselves counts."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


def reserved(device: str) -> int:
    """Bytes reserved from the device, caches emptied."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def report_kernels(step: Callable[[], object], device: str) -> None:
    """Where the device's time goes: the kernels of three steps, by their share."""
    kinds = [torch.profiler.ProfilerActivity.CUDA if device == "cuda" else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        timed(step, device, 3)
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    spent, count = sum(row.self_device_time_total for row in rows) / 3e3, sum(row.count for row in rows) / 3
    print(f"  {spent:.2f} ms of kernels a step, {count:.0f} kernels")
    for row in rows[:40]:
        print(f"    {row.self_device_time_total / 3e3:7.3f} ms {row.count / 3:6.0f} x {row.key[:150]}")
