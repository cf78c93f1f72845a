"""Local jobs listen on the loopback interface alone: looked up among the sockets of their processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

import shardwright
from runtime.pool import alone
from shardwright.loopback import stay_local
from shardwright.runtime.launch import free_port, run_locally
from shardwright.runtime.torchrun import torchrun_arguments

LISTENS = "0A"


def listening() -> set[str]:
    """The addresses on which this process listens, as the kernel writes them: 127.0.0.1 is 0100007F."""
    own = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            own |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(each)))
        except OSError:  # closed meanwhile
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in own:
                found.add(fields[1].split(":")[0])
    return found


def in_a_pool(rank: int) -> set[str]:
    return listening()


def with_a_store(local: bool) -> set[str]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1")
    if local:
        stay_local()
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    return listening()


def test_a_process_that_stays_local() -> None:
    assert alone(with_a_store, False) - {"0100007F"}, "if torch listened so by itself, nothing of this would be needed"
    assert alone(with_a_store, True) == {"0100007F"}


def test_pools_and_the_ranks_of_verify(pair) -> None:
    assert pair.run(in_a_pool) == [{"0100007F"}] * 2
    assert run_locally(listening, 2) == [{"0100007F"}] * 2


SCRIPT = """
import os, sys, torch.distributed as dist
import beside
sys.path.append(os.environ["TESTS"])
from test_loopback import listening
dist.init_process_group("gloo")
dist.barrier()
open(f"seen-{dist.get_rank()}", "w").write(f"{sorted(listening())} {sys.argv[1:]} {__name__}")
dist.barrier()
"""


def test_a_job_of_one_machine(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, x = torch.nn.Linear(8, 8), torch.empty(4, 8)
    plan = shardwright.plan(model, (x,), cluster="local:1", search="data-parallel")
    plan.save(tmp_path / "p.json")
    found = torchrun_arguments(plan, ["train.py"])
    assert "--standalone" in found and "--local-addr=127.0.0.1" in found
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "beside.py").touch()
    command = [sys.executable, "-m", "shardwright", "run", "p.json", "--", "scripts/train.py", "--steps", "3"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"TESTS": str(Path(__file__).parent)}, check=True)
    assert (tmp_path / "seen-0").read_text() == "['0100007F'] ['--steps', '3'] __main__"
