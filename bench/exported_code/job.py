"""One rank of a job that runs exported code where shardwright cannot be imported: ``job.py RANK RANKS FOLDER``.

The folder has ``jobs.json`` (for every job its name, the exported file, the model's file and function) and a place to
meet; every rank leaves its losses, gradients, updates and seconds a step there, with whole tensors.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

STEPS = 3


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def run(program: str, model: str, steps: int) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("exported", program)
    assert spec is not None and spec.loader is not None
    exported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exported)
    path, _, function = model.rpartition(":")
    built, args, *more = runpy.run_path(path)[function]()
    mesh = exported.device_mesh()
    trained = exported.parallelize(built, mesh)
    wrapped = isinstance(trained, torch.nn.parallel.DistributedDataParallel)
    own = trained.module if wrapped else trained.model if hasattr(exported, "Stage") else trained
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    losses, gradients, seconds = [], {}, []
    for number in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        losses.append(float(exported.step(trained, mesh, *args, **dict(*more))))
        if number == 0:
            gradients = {n: whole(p.grad) for n, p in own.named_parameters() if p.grad is not None}
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    updated = {n: whole(p) for n, p in own.named_parameters()}
    return {"losses": losses, "gradients": gradients, "updated": updated, "seconds": seconds}


def main(rank: int, ranks: int, folder: Path) -> None:
    try:
        import shardwright  # noqa: F401
    except ImportError:
        pass
    else:
        raise SystemExit("shardwright can be imported here, and this job is to show that nothing needs it")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for job in json.loads((folder / "jobs.json").read_text()):
        found = run(job["program"], job["model"], job.get("steps", STEPS))
        torch.save(found, folder / f"{job['name']}.{rank}.pt")
        dist.barrier()
    assert "shardwright" not in sys.modules
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
