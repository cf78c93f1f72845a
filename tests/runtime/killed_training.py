"""A training script that a torchrun job restarts: resumes from the last checkpoint, and dies where it is told to.

Arguments: plan file, folder, number of steps, and ``rank:step`` pairs at which a rank kills itself the first time.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.plans import Plan
from shardwright.runtime import parallelize
from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint
from shardwright.zoo.reference import resolve


def main() -> None:
    plan, folder, steps = Plan.load(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    deaths = {tuple(int(n) for n in pair.split(":")) for pair in sys.argv[4:]}
    dist.init_process_group("gloo")
    built = resolve("gpt:small", device="cpu")
    model = parallelize(built.model, plan, built.args, built.kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    resumed = load_checkpoint(folder / "checkpoints", model, optimizer)
    for step in range(resumed["step"] if resumed else 0, steps):
        mark = folder / f"died-{dist.get_rank()}-{step}"
        if (dist.get_rank(), step) in deaths and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        tokens, targets = (torch.roll(x, step, 1) for x in built.args)  # another batch every step
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        if step % 2 == 1:
            save_checkpoint(folder / "checkpoints", step + 1, model, optimizer)
    if dist.get_rank() == 0:
        (folder / "final").write_text(repr(loss.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
