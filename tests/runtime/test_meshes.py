"""Meshes over the ranks of a job, and the end of a process that had some."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDING = """
import atexit
import torch.distributed as dist
from shardwright.loopback import stay_local
from shardwright.runtime import meshes

asked, running = [], [True, True, False]
meshes.time.sleep = asked.append
meshes._others_run = lambda: running.pop(0)
stay_local()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
meshes.known_mesh((0,), (("data", 1),), "cpu")
meshes.known_mesh((0,), (("tensor", 1),), "cpu")
atexit.register(lambda: print("a later handler", asked))
dist.destroy_process_group()
atexit._run_exitfuncs()
print(asked == [meshes.LETTING_GO_SECONDS] * 3)
"""


BUSY = """
import threading
from shardwright.runtime import meshes

ending = threading.Event()
print(all(meshes._others_run() for _ in range(1000)))
busy = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(ending.is_set, True)])
busy.start()
print(any(meshes._others_run() for _ in range(1000)))
ending.set()
busy.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no /proc")
def test_a_thread_with_work_to_do_is_seen() -> None:
    ran = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines() == ["False", "True"], ran.stderr


def test_the_threads_of_collectives_are_waited_for_last_and_once() -> None:
    """One that asks for the interpreter's lock when that has begun to end aborts the process (seen once in 25 runs)."""
    ran = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines() == ["a later handler []", "True"], ran.stderr
