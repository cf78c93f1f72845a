"""Save under one plan, resume under another with another number of ranks: the loss curve goes on as if nothing happened."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lowering.strategies import mesh_with, random_strategy
from runtime.workers import built, device_mesh
from shardwright.runtime import parallelize
from shardwright.runtime.checkpoint import checkpoints, load_checkpoint, save_checkpoint


def started(mesh: DeviceMesh, sizes: tuple[int, ...], seed: int):
    model, args, _, graph = built("gpt:small")
    strategy = random_strategy(graph, mesh_with(sizes), seed)
    parallel = parallelize(model, strategy, mesh=mesh, graph=graph, keep=True)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2), args


def train(model, optimizer, args, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saves(rank: int, folder: str) -> list[float]:
    model, optimizer, args = started(device_mesh((2, 2)), (2, 2), seed=11)
    train(model, optimizer, args, 2)
    save_checkpoint(folder, 2, model, optimizer, {"epoch": 7})
    return train(model, optimizer, args, 3)


def resumes(rank: int, folder: str) -> tuple[list[float], int, int]:
    model, optimizer, args = started(device_mesh((4,)), (4,), seed=12)
    train(model, optimizer, args, 1)  # whatever was there before is overwritten
    found = load_checkpoint(folder, model, optimizer)
    assert found is not None
    return train(model, optimizer, args, 3), found["step"], found["epoch"]


def resume_alone(folder: str) -> list[float]:
    """On one process without any group, into the plain eager model."""
    model, args, _, _ = built("gpt:small")
    import copy

    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert not dist.is_initialized()
    assert load_checkpoint(folder, model, optimizer) is not None
    return train(model, optimizer, args, 3)


def test_resume_under_another_plan(pool, tmp_path):
    expected = pool.run(saves, str(tmp_path))[0]
    for losses, step, epoch in pool.run(resumes, str(tmp_path)):
        assert (step, epoch) == (2, 7)
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(resume_alone(str(tmp_path)), expected, rtol=1e-9, atol=0)


def rotates(rank: int, folder: str) -> None:
    model, optimizer, _ = started(device_mesh((4,)), (4,), seed=12)
    for step in (1, 2, 3):
        save_checkpoint(folder, step, model, optimizer, keep=2)


def test_half_written_checkpoints_do_not_count(pool, tmp_path: Path):
    pool.run(rotates, str(tmp_path))
    half = tmp_path / "step-9.partial"
    half.mkdir()
    (half / ".metadata").write_bytes(b"torn")
    (tmp_path / "step-8").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-2", "step-3"]
