"""Two stages on one GPU, their passes as CUDA graphs and eagerly: the same losses and parameters after some steps.

    python bench/pipeline_graphs.py [--device cpu]

The stages exchange their parcels inside the process, so that one GPU suffices for real numbers. The batches change, and once
the gradients are left and added to. Without a GPU nothing is recorded, and the two runs are alike by construction.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests"), str(HERE)]

import torch  # noqa: E402


def train(device: str, steps: int) -> tuple[list[float], list[torch.Tensor], int]:
    from runtime.pipelines import halves, pipeline_plan
    from shardwright.frontend import capture
    from shardwright.runtime import parallelize
    from shardwright.zoo.reference import resolve

    torch.manual_seed(0)
    built = resolve("gpt:layers=4,width=256,heads=4,vocab=500", batch=8, seq=64, device="cpu", dtype="float32")
    graph = capture(built.model, built.args, built.kwargs)
    plan = pipeline_plan(graph, halves(graph, 2), 4, "interleaved-1f1b", devices=1)
    module = parallelize(built.model, plan, graph=graph, device=device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        args = [torch.randint_like(x, 500) for x in built.args]
        kwargs = {name: torch.randint_like(x, 500) for name, x in built.kwargs.items()}
        loss = module(*args, **kwargs)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        if step != steps // 2:
            optimizer.zero_grad()
    recorder = module._planned.recorder
    replays = 0 if recorder is None else recorder.replays
    return losses, [p.detach().cpu() for p in module.parameters()], replays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    from fake_rank import join_fake_group

    join_fake_group(1, 0)
    found = {}
    for switch in ("1", "0"):
        os.environ["SHARDWRIGHT_CUDA_GRAPHS"] = switch
        found[switch] = train(asked.device, asked.steps)
    (recorded, ours, replays), (eager, theirs, _) = found["1"], found["0"]
    worst = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    apart = max(abs(a - b) for a, b in zip(recorded, eager, strict=True))
    print(f"{replays} of {asked.steps} steps replayed; losses differ by {apart:.1e}, parameters by {worst:.1e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
