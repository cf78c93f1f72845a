"""One rank of a pipeline on a GPU, alone: our program of a middle stage beside torch's stage and schedule classes.

    python bench/pipeline_stage_device.py --model gpt2-medium --schedule zb-h1 --json out.json

The other ranks do not exist: PyTorch's fake process group sends and receives at once, so this shows what one rank computes,
what its host does and what it holds, not the network. Both engines have the same blocks, the same micro-batches and the same
order of passes (by torch's CSV), and take turns in one run. ``--compiled`` adds both under ``torch.compile``; what an engine
refuses is printed. Memory is what is reserved from the device at the worst moment, parameters and gradients included, no
optimizer. Predicted is what our simulator says of the rank with nothing to wait for. Without a GPU:
``--device cpu --model tiny``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_rank import alternating, join_fake_group, reserved, reserved_bytes

STAGES, RANK = 4, 1
MODELS: dict[str, tuple[str, int, int]] = {
    "tiny": ("gpt:layers=4,width=64,heads=4,vocab=101", 32, 2),
    "gpt2-medium": ("gpt:layers=24,width=1024,heads=16", 1024, 4),
    "llama-7b": ("llama:layers=16,width=4096,heads=32,kv_heads=32,inner=11008,vocab=32000", 2048, 1),
}
"""What is built, the length of its sequences, and the rows of one micro-batch."""


class Blocks(nn.Module):
    """The blocks of one stage, as somebody who cuts a model by hand writes it."""

    def __init__(self, model: nn.Module, own: range, length: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[i] for i in own)  # type: ignore[index, union-attr]
        self.rotary, self.length = getattr(model, "rotary", None), length

    def forward(self, x: Tensor) -> Tensor:
        more = () if self.rotary is None else (self.rotary(self.length),)
        for block in self.blocks:
            x = block(x, *more)
        return x


def built(name: str, microbatches: int, device: str) -> Any:
    from shardwright.zoo.reference import resolve

    reference, length, rows = MODELS[name]
    dtype = "bfloat16" if device == "cuda" else "float32"
    return resolve(reference, batch=rows * microbatches, seq=length, dtype=dtype, device=device)


def blocks_of(name: str) -> tuple[int, list[str]]:
    """Blocks of a stage, and the modules before which the model is cut."""
    layers = int(MODELS[name][0].split("layers=")[1].split(",")[0])
    each = layers // STAGES
    return each, [f"blocks.{each * stage}" for stage in range(1, STAGES)]


def ours(name: str, asked: argparse.Namespace) -> tuple[nn.Module, Callable[[], None], float, float]:
    """Our module of the rank, its step, predicted seconds of the step, and predicted bytes without optimizer state."""
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, Pipelining, plan_pipeline
    from shardwright.runtime import parallelize
    from shardwright.simulator import simulate_plan
    from shardwright.simulator.play import alone

    whole = built(name, asked.microbatches, asked.device)
    graph = capture(whole.model, whole.args, whole.kwargs)
    wanted = Pipelining(STAGES, asked.microbatches, asked.schedule, blocks_of(name)[1])
    cluster = parse_cluster(asked.cluster or (f"{STAGES}xH200" if asked.device == "cuda" else f"local:{STAGES}"))
    plan = plan_pipeline(graph, cluster, wanted, Options(optimizer="sgd", ignore_device_memory=True))
    timeline = simulate_plan(plan, graph)
    seconds = alone(timeline.times, timeline.links, RANK)
    module = parallelize(whole.model, plan, graph=graph, device=asked.device)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(*whole.args, **whole.kwargs).backward()

    return module, step, seconds, timeline.memory[RANK]


def theirs(name: str, asked: argparse.Namespace, compiled: bool) -> tuple[nn.Module, Callable[[], None]]:
    """The same blocks with torch's stage and schedule classes, the order of passes from our schedule's CSV."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    from shardwright.schedules import known_schedule, write_csv

    _, length, rows = MODELS[name]
    each, _ = blocks_of(name)
    module: nn.Module = Blocks(built(name, 1, asked.device).model, range(each * RANK, each * (RANK + 1)), length)
    width = next(p.shape[-1] for p in module.parameters() if p.dim() == 2)
    parameter = next(module.parameters())
    example = torch.zeros(rows, length, width, dtype=parameter.dtype, device=asked.device, requires_grad=True)
    with torch.no_grad():
        result = module(example).requires_grad_()
    run = torch.compile(module) if compiled else module
    stage = PipelineStage(run, RANK, STAGES, torch.device(asked.device), input_args=example, output_args=result)  # type: ignore[arg-type]
    if hasattr(
        stage, "_warmup_backward_result"
    ):  # torch 2.13 asks the other stages, which do not exist, whether shapes are known
        known = torch.ones(1, dtype=torch.int32)
        stage._warmup_forward_vote = stage._warmup_backward_result = lambda *a, **k: known  # type: ignore[method-assign]
    order = _PipelineScheduleRuntime([stage], asked.microbatches, loss_fn=lambda result, target: result.sum())
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "order.csv"))
        write_csv(known_schedule(asked.schedule, STAGES, asked.microbatches), path)
        order._load_csv(path, format="compute_only")

    def step() -> None:
        module.zero_grad(set_to_none=True)
        order.step()

    return module, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2-medium")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="zb-h1", help="zb-h1 splits the backward pass, 1f1b does not")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cluster", help="whose prices the prediction uses; without it 4xH200 or local:4")
    parser.add_argument("--compiled", action="store_true", help="also both engines under torch.compile")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="in a row, of each engine, in each repeat")
    parser.add_argument("--json", type=Path, help="write everything that was measured here")
    asked = parser.parse_args()
    join_fake_group(STAGES, RANK)
    programs: dict[str, Callable[[], None]] = {}
    row: dict[str, Any] = {"torch": torch.__version__, "refused": {}} | {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(asked).items()
    }
    if asked.device == "cuda":
        row["gpu"] = torch.cuda.get_device_name()
    for label in ("ours", "torch", *(("ours compiled", "torch compiled") if asked.compiled else ())):
        before = reserved(asked.device)
        compiled = label.endswith("compiled")
        try:
            if label.startswith("ours"):
                module, step, row["predicted_seconds"], row["predicted_bytes"] = ours(asked.model, asked)
                if compiled:
                    module.compile()
            else:
                module, step = theirs(asked.model, asked, compiled)
            for _ in range(6):  # our operators are traced after a few passes, the compiler has compiled
                step()
            row[f"{label} peak_bytes"] = reserved_bytes(step, before, asked.device)
        except Exception as error:  # what torch's own classes cannot do is a result
            if label == "ours":
                raise
            row["refused"][label] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        programs[label] = step
    measured = alternating(programs, asked.device, repeats=asked.repeats, steps=asked.steps)
    row["measured"] = measured
    print(f"{asked.model}, stage {RANK} of {STAGES}, {asked.microbatches} micro-batches, {asked.schedule}")
    for label, one in measured.items():
        base = measured.get("torch compiled" if label.endswith("compiled") else "torch")
        ratio = None
        if base is not None:
            ratio = statistics.median(a / b for a, b in zip(one["walls"], base["walls"], strict=True))
        one["ratio"] = ratio
        peak = row[f"{label} peak_bytes"]
        shown = "" if peak is None else f", peak {peak / 2**30:.3f} GiB"
        times = f"{1e3 * one['seconds']:.2f} ms a step, host {1e3 * one['host_seconds']:.2f} ms"
        print(f"  {label:<15} {times}{shown}" + ("" if ratio is None else f", {ratio:.3f} x torch"))
    miss = row["predicted_seconds"] / measured["ours"]["seconds"] - 1
    print(f"  predicted       {1e3 * row['predicted_seconds']:.2f} ms ({100 * miss:+.1f} %)")
    if row["ours peak_bytes"]:
        off = row["predicted_bytes"] / row["ours peak_bytes"] - 1
        print(f"  predicted       {row['predicted_bytes'] / 2**30:.3f} GiB ({100 * off:+.1f} %)")
    for label, why in row["refused"].items():
        print(f"  {label}: {why}")
    if asked.json:
        asked.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
