"""Started by Slurm, MPI or Kubernetes: which task this is, what torchrun is told, and a script that finds its plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwright
from shardwright.cluster import parse_cluster
from shardwright.errors import RunError, ShardwrightError
from shardwright.runtime.job import task_of
from shardwright.runtime.torchrun import node_options, torchrun_arguments

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[09-10]"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM, ("Slurm", 3, 4, 1, "gpu09")),
        (SLURM | {"MASTER_ADDR": "10.0.0.1"}, ("Slurm", 3, 4, 1, "10.0.0.1")),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ("Open MPI", 1, 2, 0, "127.0.0.1"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MASTER_ADDR": "a"}, ("MPICH", 1, 2, 1, "a")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0"}, ("Kubernetes", 1, 2, 0, "job-master-0")),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "b"}, ("torchrun", 5, 8, 1, "b")),
    ],
)
def test_every_launcher_is_recognised(environment: dict[str, str], expected: tuple[Any, ...]) -> None:
    task = task_of(environment)
    assert task is not None
    assert (task.launcher, task.rank, task.count, task.local, task.address) == expected
    assert task.variables()["MASTER_PORT"].isdecimal()


def test_a_person_is_no_launcher_and_several_nodes_must_meet() -> None:
    assert (
        task_of({"HOME": "/", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_ID": "4"}) is None
    )  # the batch script itself
    with pytest.raises(RunError, match="where they meet"):
        task_of({"PMI_RANK": "1", "PMI_SIZE": "2"})
    with pytest.raises(RunError, match="SLURM_NTASKS='many'"):
        task_of(SLURM | {"SLURM_NTASKS": "many"})


def test_one_task_on_every_node_starts_the_nodes_processes() -> None:
    plan: Any = SimpleNamespace(devices=8, cluster=parse_cluster("2x4xH100"))
    task = task_of({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "23456"})
    assert task is not None
    found = torchrun_arguments(plan, ["train.py"], **node_options(task, plan))
    assert {"--nproc-per-node=4", "--nnodes=2", "--node-rank=1", "--rdzv-endpoint=first:23456"} <= set(found)
    with pytest.raises(RunError, match="started 3 tasks; the plan is for 8"):
        node_options(task_of({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "first"}), plan)


def test_an_allocation_is_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShardwrightError, match="no Slurm job"):
        parse_cluster("slurm")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2],big[01-02]")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "h100:4")
    found = parse_cluster("slurm")
    assert (len(found.nodes), found.nodes[0].devices, found.nodes[0].device.name) == (
        4,
        4,
        parse_cluster("1xH100").nodes[0].device.name,
    )
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "4")
    with pytest.raises(ShardwrightError, match="not which GPUs"):
        parse_cluster("slurm")
    assert parse_cluster("slurm:A100-80GB").size == 16


SCRIPT = """
import torch, torch.distributed as dist, shardwright
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
expected = model(torch.ones(4, 8)).sum()
loss = shardwright.parallelize(model)(torch.ones(4, 8)).sum()
assert abs(loss - expected) < 1e-4
open(f"seen-{dist.get_rank()}-of-{dist.get_world_size()}", "w").close()
"""


def test_a_script_under_srun_finds_its_plan(tmp_path: Path) -> None:
    """Emulated: two tasks with Slurm's variables, on this host."""
    with torch.device("meta"):
        model, x = torch.nn.Linear(8, 8), torch.empty(4, 8)
    shardwright.plan(model, (x,), cluster="2xH100", search="data-parallel", fewer_devices=False).save(
        tmp_path / "p.json"
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    job = os.environ | {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_JOB_ID": str(os.getpid())}
    command = [sys.executable, "-m", "shardwright", "run", "p.json", "--", "train.py"]
    tasks = [
        subprocess.Popen(command, cwd=tmp_path, env=job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [task.wait() for task in tasks] == [0, 0]
    finally:
        for task in tasks:
            task.kill()
    assert {path.name for path in tmp_path.glob("seen-*")} == {"seen-0-of-2", "seen-1-of-2"}
