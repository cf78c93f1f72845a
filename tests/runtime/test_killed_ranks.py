"""A rank killed in mid-run: torchrun restarts, training resumes from the last checkpoint, the final loss is the same.

Without a killed rank, plain torchrun on two hosts (emulated: namespaces at 100 Mbit/s) trains to the same loss as on one.
The job that is killed also moves shares of its work between its ranks in every step (parameters and optimizer state with
them, where the plan cuts those), and is killed in the middle of a move too: nothing is lost but the steps since the last
checkpoint, and no rank goes on with shares that another does not know of.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.distributed.run import main as torchrun

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from emulated_hosts import ADDRESSES, hosts, run_on_hosts
from runtime.killed_training import MODEL
from runtime.pipelines import pipeline_plan
from runtime.pool import once_more_if_killed
from runtime.test_two_hosts import emulation
from shardwright._torch_compat import listen_on_loopback
from shardwright.frontend import capture
from shardwright.graph.repeats import block_paths, span_of
from shardwright.planner import plan
from shardwright.runtime.launch import forking_context
from shardwright.runtime.torchrun import FRESH_STORE, torchrun_arguments
from shardwright.zoo.reference import resolve

__all__ = ["emulation"]
STEPS = int(os.environ.get("SHARDWRIGHT_STEPS", "6"))
SCRIPT = Path(__file__).with_name("killed_training.py")
# The acceptance run kills ten times, and moves rows, weights and blocks (SHARDWRIGHT_STEPS=12 SHARDWRIGHT_KILLS=10
# SHARDWRIGHT_SEARCHES=fsdp,megatron,pipeline); one death of each kind notices a regression.
DEATHS = int(os.environ.get("SHARDWRIGHT_KILLS", "1"))
SEARCHES = os.environ.get("SHARDWRIGHT_SEARCHES", "megatron").split(",")


@pytest.fixture(scope="module", params=SEARCHES)
def plan_file(request, tmp_path_factory) -> Path:
    built = resolve(MODEL, device="cpu")
    if request.param == "pipeline":
        graph = capture(built.model, built.args, built.kwargs)
        blocks = block_paths(graph)
        middle = span_of(graph, blocks[len(blocks) // 2]).start
        names = [op.name for op in graph.ops]
        found = pipeline_plan(graph, [names[:middle], names[middle:]], 2, "1f1b")
    else:
        options = {"search": request.param, "baselines": (), "fewer_devices": False}
        found = plan(built.model, built.args, built.kwargs, cluster="local:2", **options)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    found.save(path)
    return path


@contextmanager
def signals_as_they_are() -> Iterator[None]:
    """torchrun's agent takes the signals of the process it runs in, and keeps them."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(plan_file: Path, folder: Path, deaths: list[str], how: str = "still") -> float:
    from shardwright.plans import Plan

    script = [str(SCRIPT), str(plan_file), str(folder), str(STEPS), how, *deaths]
    arguments = torchrun_arguments(Plan.load(plan_file), script, max_restarts=len(deaths))
    forking_context()  # of which torchrun makes use: a rank that starts anew need not import everything anew
    listen_on_loopback()
    with patch.dict(os.environ, [FRESH_STORE]), signals_as_they_are():
        torchrun(["--run-path", "--start-method=forkserver", *arguments])
    return float((folder / "final").read_text())


@pytest.fixture(scope="module")
def expected(plan_file, tmp_path_factory) -> float:
    """The last loss of a job that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return once_more_if_killed(lambda: train(plan_file, folder, []))


def test_killed_rank_resumes(plan_file, expected, tmp_path):
    dice = random.Random(int(os.environ.get("SHARDWRIGHT_SEED", "0")))
    deaths = {
        f"{dice.randrange(2)}:{step}{moment}"
        for moment in ("", ":move")
        for step in dice.sample(range(1, STEPS), k=min(DEATHS, STEPS - 1))
    }
    disturbed = tmp_path / "disturbed"
    disturbed.mkdir()
    final = once_more_if_killed(lambda: train(plan_file, disturbed, sorted(deaths), "moving"))
    assert final == pytest.approx(expected, rel=1e-6)
    assert len(list(disturbed.glob("died-*"))) == len(deaths)


def test_two_hosts(emulation, plan_file, expected, tmp_path):
    with hosts("100mbit") as names:
        commands = []
        for number in range(len(names)):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
            torchrun += ["--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", "--master-port=29577"]
            commands.append([*torchrun, str(SCRIPT), str(plan_file), str(tmp_path), str(STEPS), "still"])
        once_more_if_killed(lambda: run_on_hosts(names, commands, seconds=500.0))
    assert float((tmp_path / "final").read_text()) == pytest.approx(expected, rel=1e-6)
