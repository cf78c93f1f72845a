"""The parallelized module compiled whole by inductor gives the numbers of the same module run eagerly.

    python bench/runtime_compiled.py [--models gpt:small …] [--plans fsdp …] [--backend aot_eager]

Two gloo processes; three AdamW steps eagerly and, from the same weights, through ``torch.compile(fullgraph=True)``: a graph
break is an error. Compared are every loss, gradient and parameter; fused kernels add up in another order, so they may differ
by 1e-9 (float64) or 2e-4 (float32) of the tensor's largest value, or of a thousandth of the model's largest gradient where
that is more (the gradients of keys' biases are zero in theory). AdamW's epsilon is 1e-6: with the usual 1e-8 it would turn
the rounding of such gradients into whole steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch

from shardwright.runtime import parallelize
from shardwright.runtime.launch import run_locally
from shardwright.zoo.reference import resolve

TOLERANCES = {"float64": 1e-9, "float32": 2e-4}
NOISE = 1e-3
PLANS = ("data-parallel", "fsdp", "megatron")


def find_plan(reference: str, dtype: str, search: str) -> Any:
    from shardwright.planner import plan

    built = resolve(reference, device="cpu", dtype=dtype)
    return plan(
        built.model, built.args, built.kwargs, cluster="local:2", search=search, baselines=(), fewer_devices=False
    )


def trained(
    reference: str, dtype: str, plan: Any, backend: str | None, steps: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Losses, last gradients and parameters after some steps, with the seconds of every step."""
    built = resolve(reference, device="cpu", dtype=dtype)
    model = parallelize(built.model, plan, built.args, built.kwargs)
    call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, foreach=True)
    found, seconds = {}, []
    for number in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = call(*built.args, **built.kwargs)
        loss = loss if isinstance(loss, torch.Tensor) else loss[0]
        loss.backward()
        found[f"loss of step {number}"] = loss.detach().clone()
        if number < steps - 1:
            optimizer.step()
        seconds.append(time.perf_counter() - began)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[f"{name}.grad"] = parameter.grad.to_local().clone()  # type: ignore[attr-defined]  # all are DTensors
        found[name] = parameter.to_local().detach().clone()  # type: ignore[attr-defined]
    return found, seconds


def compared(reference: str, dtype: str, plan: Any, backend: str, steps: int) -> tuple[float, str, float, float]:
    """The largest relative difference on this rank and whose it is; median seconds of eager and of compiled steps."""
    torch.set_num_threads(1)
    eager, slow = trained(reference, dtype, plan, None, steps)
    compiled, fast = trained(reference, dtype, plan, backend, steps)
    floor = NOISE * max(float(value.abs().max()) for name, value in eager.items() if "grad" in name and value.numel())
    worst, whose = 0.0, ""
    for name, value in eager.items():
        if not value.numel():
            continue
        apart = float((value - compiled[name]).abs().max()) / max(float(value.abs().max()), floor)
        if not apart <= worst:  # a NaN is worse than anything
            worst, whose = apart, name
    return worst, whose, statistics.median(slow[1:]), statistics.median(fast[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt:small", "llama:small"])
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float64")
    parser.add_argument("--steps", type=int, default=3)
    asked = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    print(
        f"torch {torch.__version__}, 2 gloo processes, {asked.backend}, fullgraph, {asked.steps} AdamW steps, {asked.dtype}"
    )
    print("| model | plan | largest relative difference | of | eager ms | compiled ms | compiling took |")
    print("|---|---|--:|---|--:|--:|--:|")
    failed = False
    for reference in asked.models:
        for search in asked.plans:
            plan = find_plan(reference, asked.dtype, search)
            began = time.perf_counter()
            ranks = run_locally(compared, 2, reference, asked.dtype, plan, asked.backend, asked.steps, seconds=1500)
            worst, whose, slow, fast = max(ranks, key=lambda row: row[0])
            failed |= not worst <= TOLERANCES[asked.dtype]
            print(
                f"| {reference} | {search} | {worst:.1e} | {whose} | {1e3 * slow:.1f} | {1e3 * fast:.1f} "
                f"| {time.perf_counter() - began:.0f} s |",
                flush=True,
            )
    raise SystemExit(f"a difference exceeds {TOLERANCES[asked.dtype]}" if failed else 0)


if __name__ == "__main__":
    main()
