"""What the runtime's Python costs: one rank with the fake process group and tiny shapes, beside its native twin.

Collectives return at once and tensors are tiny, so that a step takes what the host needs to issue it: our data-parallel,
FSDP and tensor-parallel programs against DDP, fully_shard and parallelize_module, and all of them against the plain eager
model of the same shapes. The second table times single parts in a tight loop: a collective (forward and backward of one
change of layout), an exchange of statistics, a read of a parameter, and one parameter's update by AdamW as a DTensor and
as a plain tensor. Every number is the minimum of several rounds of CPU time, which other programs on the machine disturb
least.

    python bench/runtime_host.py [--layers 8 --rounds 15]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore  # the only way to this backend

from bench.runtime_native import PAIRS, adam, context, find_plan, native_engine, train_step
from shardwright.lowering.collectives import convert, counting, exchange
from shardwright.program.steps import BoundStep, Line
from shardwright.runtime import parallelize
from shardwright.runtime.bundles import Gathering, Scattering, packed_gradients, packed_shards
from shardwright.zoo.reference import resolve

RANKS = 2


def minimum(function: Callable[[], Any], rounds: int, calls: int = 1) -> float:
    """Microseconds of CPU time of one call, the least of several rounds."""
    for _ in range(3):
        function()
    least = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            function()
        least = min(least, time.process_time() - start)
    return 1e6 * least / calls


def halves(name: str, model: Any, args: tuple[torch.Tensor, ...], rounds: int) -> tuple[float, float]:
    """Microseconds of forward and backward together, and of the optimizer's step."""
    optimizer = adam(model)
    for _ in range(3):
        train_step(name, model, optimizer, args)

    def gradients() -> None:
        optimizer.zero_grad()
        with context(name):
            model(*args).backward()

    passes = minimum(gradients, rounds)
    return passes, minimum(optimizer.step, rounds)


def faked(model: Any) -> Any:
    """DDP wants more of an all-reduce than the fake process group gives; a hook that does nothing stands in for it."""

    def reduced(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations and takes no postponed ones
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, reduced)
    return model


def plans(reference: str, planned: str, rounds: int) -> None:
    """``planned`` is the same model at a size at which splitting pays; the tiny one is split likewise."""
    print(f"{reference}: CPU time of a step in microseconds; 'over' is what is above the eager model, per parameter")
    print(f"{'engine':20s} {'passes':>9s} {'AdamW':>8s} {'step':>9s} {'ratio':>6s} {'over':>7s}  collectives of a step")
    for search, twin in PAIRS.items():
        built, whole = resolve(reference, device="cpu"), resolve(reference, device="cpu")
        local = built.args if search == "megatron" else tuple(x.chunk(RANKS)[0] for x in built.args)
        parameters = len(list(whole.model.parameters()))
        eager = sum(halves("eager", whole.model, local, rounds))
        ours = parallelize(built.model, find_plan(planned, search).strategy, built.args, built.kwargs)
        with counting() as performed:
            train_step(search, ours, adam(ours), built.args)
        counts = ", ".join(f"{n} {kind}" for (kind, _), n in performed.steps.items())
        taken = {search: halves(search, ours, built.args, rounds)}
        taken[twin] = halves(twin, faked(native_engine(twin, resolve(reference, device="cpu").model)), local, rounds)
        for name, (passes, update) in taken.items():
            total = passes + update
            ratio = f"{total / sum(taken[twin]):6.2f}" if name == search else " " * 6
            over = (total - eager) / parameters
            print(f"{name:20s} {passes:9.0f} {update:8.0f} {total:9.0f} {ratio} {over:7.1f}  ", end="")
            print(counts if name == search else f"eager {eager:.0f}, {parameters} parameters", flush=True)


def parts(rounds: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    line = Line(group.group_name, RANKS, 0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    x = torch.zeros(4, 4, requires_grad=True)
    ones = torch.ones(4, 4)
    reduced = (BoundStep("all_reduce", line),)
    gather, scatter = (BoundStep("all_gather", line, 0, 8),), (BoundStep("reduce_scatter", line, 0, 8),)

    def parameter() -> torch.nn.Parameter:
        return torch.nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh, (Replicate(),), run_check=False))

    def gather_one() -> None:
        Gathering.start(packed_shards([x.detach()], gather), gather[0]).wait()

    def scatter_one() -> None:
        Scattering.start(packed_gradients([torch.ones(8, 4)], scatter), scatter).wait()

    def passed(function: Callable[[], torch.Tensor], gradient: torch.Tensor) -> Callable[[], None]:
        return lambda: function().backward(gradient)

    rows = {
        "an operator, forward and backward": passed(lambda: x * 2, ones),
        "a collective, forward alone": lambda: convert(x, reduced, ()),
        "a collective, forward and backward": passed(lambda: convert(x, reduced, reduced), ones),
        "an exchange, forward and backward": passed(lambda: exchange(x, "sum", (line,)), ones),
        "a parameter gathered": gather_one,
        "a gradient scattered": scatter_one,
    }
    print("\nmicroseconds of one part")
    for name, function in rows.items():
        print(f"{name:40s} {minimum(function, rounds, 200):8.1f}", flush=True)
    for kind, make in (("a DTensor", parameter), ("a plain tensor", lambda: torch.nn.Parameter(torch.zeros(4, 4)))):
        for way in ("", "foreach", "fused"):
            held = [make() for _ in range(64)]
            for p in held:
                p.grad = torch.zeros_like(p)
            update = torch.optim.AdamW(held, **({way: True} if way else {})).step
            name = f"AdamW of {kind}{', ' if way else ''}{way}"
            print(f"{name:40s} {minimum(update, rounds) / 64:8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    real = f"gpt:layers={given.layers},width=256,heads=4,vocab=8192,batch=8,seq=128"
    plans(f"gpt:layers={given.layers},width=16,heads=4,vocab=64,batch=4,seq=8", real, given.rounds)
    parts(given.rounds)


if __name__ == "__main__":
    main()
