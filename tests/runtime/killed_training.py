"""A training script that a torchrun job restarts: resumes from the last checkpoint, and dies where it is told to.

Arguments: plan file, folder, number of steps, ``still`` or ``moving`` (other shares for each rank in every step), and
``rank:step`` at which a rank kills itself the first time; ``rank:step:move`` in the middle of a move: of rows, when it has a
program for its new ones and has told nobody; of parameters, when some have moved and others have not.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.loopback import ADDRESS, stay_local
from shardwright.plans import Plan
from shardwright.runtime import moving as going_over
from shardwright.runtime import parallelize, recut
from shardwright.runtime.assistant import assist
from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint
from shardwright.zoo.reference import resolve

MODEL = "gpt:small,heads=4"


def main() -> None:
    plan, folder, steps = Plan.load(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    moving, deaths = sys.argv[4] == "moving", set(sys.argv[5:])
    if os.environ["MASTER_ADDR"] == ADDRESS:
        stay_local()
    dist.init_process_group("gloo")
    built = resolve(MODEL, device="cpu")
    model = parallelize(built.model, plan, built.args, built.kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    resumed = load_checkpoint(folder / "checkpoints", model, optimizer)
    if dist.get_rank() == 0:
        with (folder / "resumed").open("a") as file:
            file.write(f"{resumed['step'] if resumed else 0}\n")
    assistant, exchange = assist(model, optimizer) if moving else None, recut.exchanged
    prepare = going_over.prepared

    def die_if_told(moment: str) -> None:
        mark = folder / f"died-{moment.replace(':', '-')}"
        if moment in deaths and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(resumed["step"] if resumed else 0, steps):
        moment = f"{dist.get_rank()}:{step}"
        die_if_told(moment)
        if assistant is not None:
            moved = 0

            def exchanged(*given: Any, at: str = moment) -> Any:
                nonlocal moved
                moved += 1
                if moved == 5:
                    die_if_told(f"{at}:move")
                return exchange(*given)

            recut.exchanged = exchanged
            weights = assistant._movers[0].mover.shares.weights
            if not weights:  # where no parameter moves: after the program for the new rows is built

                def prepared(*given: Any, at: str = moment) -> Any:
                    made = prepare(*given)
                    die_if_told(f"{at}:move")
                    return made

                going_over.prepared = prepared
            whole = sum(assistant.rows)
            first = 1 if step % 2 else whole - 1  # never what they have, also after a restart
            assistant.move((first, whole - first))
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
