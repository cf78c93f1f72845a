"""One rank of an eight-way tensor-parallel Llama, our program against the same rank written with ``parallelize_module``.

    python bench/rank_native.py plan                     # anywhere: makes the plans (bench/measured/rank_native)
    python bench/rank_native.py measure -o ranks.json    # on one GPU, under 10 minutes; torch alone suffices
    python bench/rank_native.py measure --tiny -o r.json # the same on a CPU in a minute, to see that it runs
    python bench/rank_native.py show ranks.json

Four decoder blocks of Llama 7B's width (bfloat16, 2048 positions), forward, backward and fused AdamW, with PyTorch's fake
process group: collectives take no time, which leaves the program itself. ``tp`` is Megatron's split, ``sp`` its
sequence-parallel form, ``found`` whatever our search chooses (beside the ``tp`` twin, without a bar). ``eager``: both as
they are; ``compiled``: ours by ``model.compile()``, the twin by ``torch.compile``, and ours as it is beside both. Programs
alternate; medians are compared. Bars: compiled at most 0.95 times the compiled twin, as it is below the compiled twin.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor, nn

import fake_rank

PLANS = Path(__file__).resolve().parent / "measured" / "rank_native"
WORLD = 8
BAR = 0.95
WARM = 10
"""Steps before anything is timed: ours is traced after the third and recorded after the fifth."""


@dataclass(frozen=True)
class Size:
    """A stack of decoder blocks and its input."""

    layers: int = 4
    width: int = 4096
    heads: int = 32
    inner: int = 11_008
    batch: int = 4
    seq: int = 2048
    dtype: str = "bfloat16"


SIZES = {"7b": Size(), "7b-one": Size(batch=1), "tiny": Size(2, 64, 8, 128, 2, 16, "float32")}
VARIANTS = {"tp": "megatron", "sp": "megatron-sp", "found": "auto"}
RESTING = (
    "blocks.*norm.weight=R",
    *(f"blocks.*.{name}.weight=S0" for name in ("query", "key", "value", "gate", "up")),
    *(f"blocks.*.{name}.weight=S1" for name in ("output", "down")),
)
PINS = {  # norms and residual sums (the operators of a block itself) on every rank alike, or cut along the sequence
    "tp": (*RESTING, "blocks.*_norm=none", "blocks.?=none"),
    "sp": (*RESTING, "blocks.*_norm=i1", "blocks.?=i1"),
    "found": (),
}


class Stack(nn.Module):
    """Decoder blocks alone: hidden states in, the mean square of what comes out as a loss."""

    def __init__(self, size: Size) -> None:
        from shardwright.zoo.layers import GatedFeedForward, Rotary
        from shardwright.zoo.llama import Block

        super().__init__()
        self.rotary = Rotary(size.seq, size.width // size.heads)
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, size.heads, GatedFeedForward(size.width, size.inner), 0.0)
            for _ in range(size.layers)
        )
        self.positions = size.seq

    def forward(self, x: Tensor) -> Tensor:
        rotation = self.rotary(self.positions)
        for block in self.blocks:
            x = block(x, rotation)
        return x.float().square().mean()


def on_meta(size: Size) -> tuple[Stack, Tensor]:
    """The stack and its input without memory."""
    dtype, before = getattr(torch, size.dtype), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return Stack(size), torch.empty(size.batch, size.seq, size.width, dtype=dtype)
    finally:
        torch.set_default_dtype(before)


def make_plans(folder: Path) -> None:
    """Plan every size and variant for eight H200; ``tp`` and ``sp`` are pinned to what the hand-written twins do."""
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph

    folder.mkdir(parents=True, exist_ok=True)
    for size_name, size in SIZES.items():
        model, x = on_meta(size)
        graph = capture(model, (x,))
        for variant, search in VARIANTS.items():
            axes = 2 if variant == "found" else 1
            options = Options(search, (), max_axes=axes, pins=PINS[variant], fewer_devices=False, time_limit=30.0)
            plan = plan_graph(graph, parse_cluster("8xH200"), options)
            plan.save(folder / f"{size_name}-{variant}.json")
            print(f"{size_name}-{variant}: {plan.shape}, predicted {1e3 * plan.prediction.step_seconds:.2f} ms")


def ours(size: Size, plan_path: Path, device: str) -> tuple[nn.Module, Tensor]:
    """Rank 0 of the plan."""
    from shardwright.frontend import capture
    from shardwright.plans import Plan
    from shardwright.plans.plan import Signature
    from shardwright.runtime import parallelize

    model, x = on_meta(size)
    graph = capture(model, (x,))
    plan = Plan.load(plan_path)
    plan = replace(plan, signature=Signature.of(graph))  # another PyTorch may fingerprint the same operators otherwise
    parallel = parallelize(model, plan, graph=graph, device=device, initialise=_buffers_only)
    return parallel, torch.empty(x.shape, dtype=x.dtype, device=device).normal_()


def _buffers_only(module: nn.Module) -> None:
    """Parameters get their numbers later, on the device; tables of positions are made as they always are."""
    if module._buffers:
        module.reset_parameters()


def by_hand(size: Size, variant: str, device: str) -> tuple[nn.Module, Tensor]:
    """The same rank as an expert writes it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model, x = on_meta(size)
    mesh = init_device_mesh(device, (WORLD,))
    sequence = variant == "sp"
    between = {"output_layouts": Shard(1)} if sequence else {}
    split: dict[str, Any] = {f"attention.{part}": ColwiseParallel() for part in ("query", "key", "value")}
    split |= {"feed.gate": ColwiseParallel(), "feed.up": ColwiseParallel()}
    split |= {"attention.output": RowwiseParallel(**between), "feed.down": RowwiseParallel(**between)}
    if sequence:
        split |= {"attention_norm": SequenceParallel(), "feed_norm": SequenceParallel()}
        whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        split |= {"attention": PrepareModuleInput(**whole), "feed": PrepareModuleInput(**whole)}
    for block in model.blocks:
        parallelize_module(block, mesh, split, src_data_rank=None)
    model.to_empty(device=device)
    model.rotary.reset_parameters()
    length = size.seq // WORLD if sequence else size.seq
    return model, torch.empty(size.batch, length, size.width, dtype=x.dtype, device=device).normal_()


def local_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """What this rank holds of every parameter."""
    from torch.distributed.tensor import DTensor

    return {name: tuple((p.to_local() if isinstance(p, DTensor) else p).shape) for name, p in model.named_parameters()}


def fill(model: nn.Module) -> None:
    """Random numbers of equal scale: a device is faster on constants."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if "norm" in name:
                local.fill_(1.0)
            else:
                local.normal_(std=0.02)


def training_step(model: nn.Module, call: Callable[..., Any], x: Tensor) -> Callable[[], None]:
    """Forward, backward, fused AdamW; plain parameters and DTensors in lists of their own, as one list cannot hold both."""
    from torch.distributed.tensor import DTensor

    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in kinds.values()], lr=1e-5, fused=True)

    def step() -> None:
        call(x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compare(
    size_name: str, variant: str, mode: str, device: str, folder: Path, repeats: int, kernels: bool
) -> dict[str, Any]:
    """Both programs of one variant, alternating; ``kernels``: also where the device's time goes."""
    size = SIZES[size_name]
    twin = "tp" if variant == "found" else variant
    row: dict[str, Any] = {"size": size_name, "variant": variant, "mode": mode, **asdict(size)}
    programs, shapes = {}, {}
    for name in ("ours", "native") if mode == "eager" else ("ours", "ours eager", "native"):
        before = fake_rank.allocated(device)
        built = (
            ours(size, folder / f"{size_name}-{variant}.json", device)
            if name != "native"
            else by_hand(size, twin, device)
        )
        model, x = built
        fill(model)
        shapes[name] = local_shapes(model)
        began = time.perf_counter()
        call: Callable[..., Any] = model
        if mode != "eager" and name == "ours":
            model.compile()
        elif mode != "eager" and name == "native":
            call = torch.compile(model, fullgraph=True, dynamic=False)
        step = training_step(model, call, x)
        for _ in range(WARM):
            step()
        fake_rank.synchronise(device)
        row[f"{name}_first_seconds"] = time.perf_counter() - began
        row[f"{name}_peak_bytes"] = fake_rank.peak_bytes(step, before, device)
        programs[name] = step
    if variant != "found":
        assert shapes["ours"] == shapes["native"], (shapes["ours"], shapes["native"])
    taken = fake_rank.alternating(programs, device, repeats=repeats, steps=1 if device == "cpu" else 5)
    row |= {f"{name}_{key}": value for name, values in taken.items() for key, value in values.items()}
    for name, step in programs.items() if kernels else ():
        print(f"{size_name} {variant} {mode}, {name}:")
        fake_rank.report_kernels(step, device)
    row["time_ratio"] = row["ours_seconds"] / row["native_seconds"]
    if mode != "eager":
        row["eager_ratio"] = row["ours eager_seconds"] / row["native_seconds"]
    if device == "cuda":
        row["memory_ratio"] = row["ours_peak_bytes"] / row["native_peak_bytes"]
    return row


def measure(asked: argparse.Namespace) -> None:
    """Every comparison in a process of its own, the most important first; what is done is written down at once."""
    device = "cuda" if torch.cuda.is_available() and not asked.tiny else "cpu"
    sizes = ("tiny",) if asked.tiny else asked.sizes
    jobs = [(s, v, m) for s in sizes for v in asked.variants for m in asked.modes]
    started, rows = time.perf_counter(), []
    for size, variant, mode in jobs:
        left = asked.limit - (time.perf_counter() - started)
        row = {"size": size, "variant": variant, "mode": mode, "error": "no time left"}
        if left > 20:
            command = [sys.executable, __file__, "one", size, variant, mode, device, "--plans", str(asked.plans)]
            row = _finished([*command, "--repeats", str(asked.repeats)], left, row)
        rows.append(row)
        shown = (
            row.get("error") or f"ours {1e3 * row['ours_seconds']:.2f} ms, native {1e3 * row['native_seconds']:.2f} ms"
        )
        print(f"{size} {variant} {mode}: {shown}", flush=True)
        about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
        asked.output.write_text(json.dumps(about | {"rows": rows}))
    print(table(asked.output))


def _finished(command: list[str], seconds: float, row: dict[str, Any]) -> dict[str, Any]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return row | {"error": "ran out of time"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    return row | {"error": " / ".join(done.stderr.strip().splitlines()[-3:])[:600]}


def table(measured: Path) -> str:
    """Measured rows as Markdown."""
    stored = json.loads(measured.read_text())
    lines = [
        f"{stored['device']}, torch {stored['torch']}; one rank of {WORLD}, medians of alternating repetitions.",
        "",
        "| size | plan | mode | ours ms | by hand ms | ratio | ours as it is ÷ by hand | ours GiB | by hand GiB | ratio |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in stored["rows"]:
        start = f"| {row['size']} | {row['variant']} | {row['mode']} |"
        if "error" in row:
            lines.append(f"{start} did not run: {row['error']} | | | | | | |")
            continue
        times = f" {1e3 * row['ours_seconds']:.2f} | {1e3 * row['native_seconds']:.2f} | {row['time_ratio']:.3f} |"
        times += f" {row['eager_ratio']:.3f} |" if "eager_ratio" in row else " |"
        memory = " | | |"
        if "memory_ratio" in row:
            mine, theirs = (row[f"{name}_peak_bytes"] / 2**30 for name in ("ours", "native"))
            memory = f" {mine:.2f} | {theirs:.2f} | {row['memory_ratio']:.3f} |"
        lines.append(start + times + memory)
    barred = [row["time_ratio"] for row in stored["rows"] if "eager_ratio" in row and row["variant"] != "found"]
    if barred:
        lines += ["", f"Worst compiled ratio of tp and sp: {max(barred):.3f} (bar {BAR})."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan").add_argument("-o", "--output", type=Path, default=PLANS)
    measuring = commands.add_parser("measure")
    measuring.add_argument("-o", "--output", type=Path, required=True)
    measuring.add_argument("--tiny", action="store_true", help="a small stack on the CPU")
    measuring.add_argument("--sizes", nargs="+", choices=SIZES, default=["7b", "7b-one"])
    measuring.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    measuring.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["compiled", "eager"])
    measuring.add_argument("--limit", type=float, default=560.0, help="seconds in all")
    one = commands.add_parser("one")
    for name in ("size", "variant", "mode", "device"):
        one.add_argument(name)
    one.add_argument("--kernels", action="store_true", help="say where the device's time goes")
    for each in (measuring, one):
        each.add_argument("--plans", type=Path, default=PLANS)
        each.add_argument("--repeats", type=int, default=11)
    commands.add_parser("show").add_argument("measured", type=Path)
    asked = parser.parse_args()
    if asked.command == "plan":
        make_plans(asked.output)
    elif asked.command == "measure":
        measure(asked)
    elif asked.command == "show":
        print(table(asked.measured))
    else:
        torch.set_float32_matmul_precision("highest")
        fake_rank.join_fake_group(WORLD)
        row = compare(asked.size, asked.variant, asked.mode, asked.device, asked.plans, asked.repeats, asked.kernels)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
