"""A node lost in the middle of a job: two torchrun agents on one machine, one of them killed with its process.

    python bench/lost_node.py > bench/measured/lost_node.txt

The job is started with ``shardwright run --elastic --nnodes 1:2``, a plan for two processes (fsdp) and a checkpoint
after every step. After five steps one agent and its process are killed; the other starts anew with one process, plans
for it and reads the checkpoint. Printed are the losses of all steps with the number of processes, and those of an
undisturbed job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, LOST_AFTER, PORT = 12, 5, 29777
MODEL = "gpt:small"


def train(folder: Path) -> None:
    """What every process runs."""
    import torch
    import torch.distributed as dist

    import shardwright
    from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint
    from shardwright.zoo.reference import resolve

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    built = resolve(MODEL, device="cpu")
    model = shardwright.parallelize(built.model, None, built.args, built.kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    resumed = load_checkpoint(folder / "checkpoints", model, optimizer)
    for step in range(resumed["step"] if resumed else 0, STEPS):
        batch = [torch.roll(x, step, 1) for x in built.args]
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        save_checkpoint(folder / "checkpoints", step + 1, model, optimizer)
        if dist.get_rank() == 0:
            with (folder / "log").open("a") as log:
                log.write(f"step {step}, {dist.get_world_size()} processes, loss {loss.item():.8f}\n")
        time.sleep(0.5)  # so that the loss of a node meets a job that still runs
    dist.barrier()
    dist.destroy_process_group()


def job(folder: Path, plan: Path, lost: bool) -> str:
    """Two agents; one of them may be lost."""
    folder.mkdir()
    command = [sys.executable, "-m", "shardwright", "run", str(plan), "--elastic", "--nnodes", "1:2"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{PORT}", "--max-restarts", "3"]
    agents = []
    for node in range(2):
        script = ["--", str(Path(__file__).resolve()), str(folder)]
        agents.append(subprocess.Popen([*command, "--node-rank", str(node), *script], stderr=subprocess.DEVNULL))
        time.sleep(2)
    log = folder / "log"
    while lost and (not log.exists() or len(log.read_text().splitlines()) < LOST_AFTER):
        time.sleep(0.1)
    if lost:
        children = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
        for process in (agents[1].pid, *map(int, children)):
            os.kill(process, signal.SIGKILL)
    agents[0].wait(240)
    agents[1].wait(240)
    return log.read_text()


def main() -> None:
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch) / "plan.json"
        options = ["--cluster", "local:2", "--search", "fsdp", "--all-devices", "-o", str(plan)]
        subprocess.run([sys.executable, "-m", "shardwright", "plan", MODEL, *options], check=True, capture_output=True)
        for name, lost in (("undisturbed", False), (f"a node lost after {LOST_AFTER} steps", True)):
            print(f"{name}:\n{job(Path(scratch) / str(lost), plan, lost)}", flush=True)


if __name__ == "__main__":
    main()
