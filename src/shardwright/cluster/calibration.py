"""Measuring the machine: kernels over shapes, dtypes and passes, the host's dispatch times, optimizer steps, collectives.

``python -m shardwright.cluster.calibration -o device.toml --raw points.json`` needs nothing but torch and numpy. Each
group of cases has a share of the time; a group that runs out of it has measured an even sample of its cases.
A case that fails (a kernel the device lacks, too little memory) is left out and counted. The raw points are kept so
that curves can be fitted again without the machine.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwright.cluster import cases, cases_convolution, cases_dispatch, cases_memory
from shardwright.cluster.cases import Case, Maker
from shardwright.cluster.pace import on_quietest_core
from shardwright.cluster.timing import Stopwatch

Progress = Callable[[float, str], None]
"""Told the share of the work that is done and what is being measured."""


CONVOLUTION_FLOPS = (("bfloat16", 1e12), ("float32", 5e11))
CONVOLUTIONS_DRAWN = 560
"""Shapes of convolutions that a GPU is given, as far as there is time."""
LEAST_CASES = 6
"""Of every group so many are measured, however little time there is."""


@dataclass
class Clock:
    """A share of the time for one group of cases."""

    group: str
    cases: list[Case]
    seconds: float


def _groups(make: Maker, total: float) -> list[Clock]:
    """What is measured on this kind of device and how the time is shared out."""
    if make.device.type == "cuda":
        exponents = (10, 12, 14, 16, 18, 20, 22, 24, 26, 28)
        sizes, groups = tuple(2**e for e in exponents), cases_convolution.drawn_groups()
        shapes = cases_convolution.drawn_convolutions(CONVOLUTIONS_DRAWN)

        def convolutions(dtype: str, most: float) -> Iterator[Case]:
            return cases_convolution.convolutions(make, dtype, most, (2, 8, 32, 4, 16, 128), shapes=shapes, spread=True)

        plan: list[tuple[str, float, Iterable[Case]]] = [
            ("matmul bfloat16", 0.11, cases.matmuls(make, "bfloat16", 5e12)),
            ("matmul float32", 0.11, cases.matmuls(make, "float32", 4e11)),
            ("matmul float16", 0.02, cases.matmuls(make, "float16", 2e12)),
            ("matmul tf32", 0.02, cases.matmuls(make, "tf32", 2e12)),
            ("odd matmul bfloat16", 0.03, cases.odd_matmuls(make, "bfloat16", 4e12)),
            ("odd matmul float32", 0.02, cases.odd_matmuls(make, "float32", 4e11)),
            ("batched matmul bfloat16", 0.03, cases.batched(make, "bfloat16", 1e12)),
            ("batched matmul float32", 0.03, cases.batched(make, "float32", 2e11)),
            *(
                (
                    f"grouped convolution {dtype}",
                    0.03,
                    cases_convolution.convolutions(make, dtype, 1e12, (2, 8, 32, 4, 16), shapes=groups, spread=True),
                )
                for dtype in ("bfloat16", "float32")
            ),
            ("attention float32", 0.04, cases.attentions(make, "float32", 2e11)),
            ("memory bfloat16", 0.12, cases_memory.memory_kernels(make, "bfloat16", sizes)),
            ("memory float32", 0.12, cases_memory.memory_kernels(make, "float32", sizes)),
            ("lstm bfloat16", 0.06, cases.recurrences(make, "bfloat16", 1e12)),
            ("lstm float32", 0.06, cases.recurrences(make, "float32", 5e11)),
            ("attention bfloat16", 0.12, cases.attentions(make, "bfloat16", 1e12)),
            # Whatever time is left: libraries choose among hundreds of kernels, and no two shapes tell of a third.
            ("convolution", 1.0, itertools.chain(*(convolutions(dtype, most) for dtype, most in CONVOLUTION_FLOPS))),
        ]
    else:
        sizes = tuple(2**e for e in (11, 16, 21, 23))  # the last beyond caches, and beyond what malloc keeps mapped
        plan = [
            ("memory float32", 0.32, cases_memory.memory_kernels(make, "float32", sizes)),
            ("matmul float32", 0.18, cases.matmuls(make, "float32", 8e9, 16)),
            ("matmul bfloat16", 0.04, cases.matmuls(make, "bfloat16", 1e9)),
            ("batched matmul float32", 0.05, cases.batched(make, "float32", 1e9)),
            ("convolution float32", 0.16, cases_convolution.convolutions(make, "float32", 4e9, (4, 1), once=True)),
            ("attention float32", 0.12, cases.attentions(make, "float32", 1e9)),
            ("lstm float32", 0.1, cases.recurrences(make, "float32", 8e9)),
            ("memory bfloat16", 0.03, cases_memory.memory_kernels(make, "bfloat16", sizes)),
        ]
    ordered = {True: cases.ends_first, False: cases.shuffled}
    return [Clock(name, ordered[name.startswith("memory")](iter(items)), share * total) for name, share, items in plan]


def _picked(clock: Clock, only: Sequence[str]) -> Clock:
    """What of a group is measured where only some groups or kernels are asked for."""
    if any(word in clock.group for word in only):
        return clock
    return replace(clock, cases=[case for case in clock.cases if case.kernel in only])


def _point(case: Case, seconds: float) -> dict[str, Any]:
    return {
        "kernel": case.kernel,
        "step": case.step,
        "dtype": case.dtype,
        "features": dict(case.features),
        "flops": case.flops,
        "bytes": case.bytes,
        "seconds": seconds,
    }


def _kernel_points(
    watch: Stopwatch, clock: Clock, report: Progress, end: float
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    points: list[dict[str, Any]] = []
    failed: dict[str, int] = {}
    end = min(time.perf_counter() + clock.seconds, end)
    torch.set_float32_matmul_precision("high" if "tf32" in clock.group else "highest")
    for number, case in enumerate(clock.cases):
        if number >= LEAST_CASES and time.perf_counter() > end:
            break
        try:
            points.append(_point(case, watch.seconds(case.build())))
        except (RuntimeError, NotImplementedError) as error:  # a missing kernel or memory: go on without this case
            key = f"{case.kernel}/{case.dtype}/{case.step}: {str(error).splitlines()[0][:120]}"
            failed[key] = failed.get(key, 0) + 1
        report((number + 1) / len(clock.cases), clock.group)
    torch.set_float32_matmul_precision("highest")
    return points, failed


def _optimizers(watch: Stopwatch, make: Maker, largest: int) -> list[dict[str, Any]]:
    """Whole steps of ``torch.optim`` over many small and few large tensors."""
    rows = []
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
        "momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-4),
    }
    dtypes = ("float32", "bfloat16") if make.device.type == "cuda" else ("float32",)
    for name, build in kinds.items():
        for dtype in dtypes:
            for tensors, elements in (
                (1, largest),
                (1, largest // 4),
                (1, 2**12),
                (16, 2**12),
                (256, 2**12),
                (16, largest // 16),
                (256, largest // 256),
            ):
                parameters = [make(elements, dtype=dtype, grad=True) for _ in range(tensors)]
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                step = build(parameters).step
                step()
                watch.wait()
                host = watch.host_seconds(step, calls=3 if tensors * elements < 2**20 else 1, repeats=3)
                device = watch.seconds(step) if make.device.type == "cuda" else host
                bytes_each = elements * parameters[0].element_size()
                row = {"name": name, "dtype": dtype, "tensors": tensors, "bytes": tensors * bytes_each}
                rows.append(row | {"host": host, "device": device})
    return rows


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the measurement ran on."""
    info: dict[str, Any] = {"torch": torch.__version__, "kind": device.type, "date": f"{datetime.date.today()}"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        info |= {"name": properties.name, "memory": total, "free": free, "processors": properties.multi_processor_count}
        info |= {"allocated_context": total - free}
    else:
        info |= {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    return info


def listed(device: torch.device, only: Sequence[str]) -> list[str]:
    """A line for every kernel that would be measured: its group, its passes and how many sizes.

    >>> listed(torch.device("cpu"), ["gelu"])[0]
    'memory float32   gelu                     forward 4, backward 4'
    """
    lines = []
    for clock in (_picked(clock, only) for clock in _groups(Maker(device), 1.0)):
        kernels = dict.fromkeys(case.kernel for case in clock.cases)
        for kernel in sorted(kernels):
            steps = Counter(case.step for case in clock.cases if case.kernel == kernel)
            sizes = ", ".join(f"{step} {steps[step]}" for step in sorted(steps, reverse=True))
            lines.append(f"{clock.group:16} {kernel:24} {sizes}")
    return lines


def measure(
    device: torch.device,
    seconds: float = 120.0,
    report: Progress = lambda share, what: None,
    only: Sequence[str] = ("",),
) -> dict[str, Any]:
    """All raw measurements of one device as a JSON-ready dictionary, taking at most about ``seconds``.

    ``only`` picks groups of cases whose name holds one of these words, and kernels of these names.
    """
    machine = describe_machine(device)
    data: dict[str, Any] = {"machine": machine, "points": [], "failed": {}}
    began = time.perf_counter()
    report(0.0, "dispatch")
    # A processor that computes for itself may need all its cores; the host of an accelerator issues from one.
    with on_quietest_core() if device.type == "cuda" else nullcontext():
        watch, make = Stopwatch(device), Maker(device)
        data["dispatch"] = cases_dispatch.dispatch_seconds(watch.yardstick)
        report(0.02, "optimizer")
        data["optimizers"] = _optimizers(watch, make, 2**28 if device.type == "cuda" else 2**24)  # beyond any cache
    # On a busy machine the first part may have taken all the time; kernels are what it is about.
    left = max(began + seconds - time.perf_counter(), seconds / 2)
    end = time.perf_counter() + left
    groups = [picked for clock in _groups(make, left) if (picked := _picked(clock, only)).cases]
    for number, clock in enumerate(groups):

        def inside(share: float, what: str, number: int = number) -> None:
            report(0.05 + 0.95 * (number + share) / len(groups), what)

        points, failed = _kernel_points(watch, clock, inside, end)
        data["points"] += points
        data["failed"] |= failed
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report(1.0, "done")
    data["seconds"] = time.perf_counter() - began
    return data


def main() -> None:
    """Measure without the command line's progress bar (a machine may have torch and nothing else)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="device file to write (TOML)")
    parser.add_argument("--raw", type=Path, help="raw points to write (JSON)")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="what to measure, such as attention (a group) or gelu (a kernel)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--list", action="store_true", help="say what would be measured, and measure nothing")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(listed(torch.device(asked.device), asked.only)))
        return
    last = [""]

    def report(share: float, what: str) -> None:
        if what != last[0]:
            print(f"{100 * share:5.1f} %  {what}", flush=True)
            last[0] = what

    data = measure(torch.device(asked.device), asked.seconds, report, asked.only)
    if asked.raw:
        asked.raw.write_text(json.dumps(data))
    print(f"{len(data['points'])} points in {data['seconds']:.0f} s; failed: {data['failed']}")
    if asked.output:
        from shardwright.cluster.fitting import device_file

        asked.output.write_text(device_file(data))


if __name__ == "__main__":
    main()
