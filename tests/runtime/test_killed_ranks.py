"""A rank killed in mid-run: torchrun restarts, training resumes from the last checkpoint, the final loss is the same.

The job that is killed also moves shares of its work between its ranks in every step (parameters and optimizer state with
them, where the plan cuts those), and is killed in the middle of a move too: nothing is lost but the steps since the last
checkpoint, and no rank goes on with shares that another does not know of.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.pipelines import pipeline_plan
from runtime.pool import once_more_if_killed
from shardwright.frontend import capture
from shardwright.graph.repeats import block_paths, span_of
from shardwright.planner import plan
from shardwright.runtime.torchrun import FRESH_STORE, torchrun_arguments
from shardwright.zoo.reference import resolve

STEPS = int(os.environ.get("SHARDWRIGHT_STEPS", "6"))
SCRIPT = Path(__file__).with_name("killed_training.py")
# The acceptance run kills ten times, and moves rows, weights and blocks (SHARDWRIGHT_STEPS=12 SHARDWRIGHT_KILLS=10
# SHARDWRIGHT_SEARCHES=fsdp,megatron,pipeline); one death of each kind notices a regression.
DEATHS = int(os.environ.get("SHARDWRIGHT_KILLS", "1"))
SEARCHES = os.environ.get("SHARDWRIGHT_SEARCHES", "megatron").split(",")


@pytest.fixture(scope="module", params=SEARCHES)
def plan_file(request, tmp_path_factory) -> Path:
    built = resolve("gpt:small,heads=4,layers=4", device="cpu")
    if request.param == "pipeline":
        graph = capture(built.model, built.args, built.kwargs)
        middle = span_of(graph, block_paths(graph)[2]).start
        names = [op.name for op in graph.ops]
        found = pipeline_plan(graph, [names[:middle], names[middle:]], 2, "1f1b")
    else:
        options = {"search": request.param, "baselines": (), "fewer_devices": False}
        found = plan(built.model, built.args, built.kwargs, cluster="local:2", **options)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    found.save(path)
    return path


def train(plan_file: Path, folder: Path, deaths: list[str], how: str = "still") -> float:
    from shardwright.plans import Plan

    script = [str(SCRIPT), str(plan_file), str(folder), str(STEPS), how, *deaths]
    arguments = torchrun_arguments(Plan.load(plan_file), script, max_restarts=len(deaths))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", FRESH_STORE[0]: FRESH_STORE[1]}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240 + 60 * len(deaths), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return float((folder / "final").read_text())


def test_killed_rank_resumes(plan_file, tmp_path):
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    expected = once_more_if_killed(lambda: train(plan_file, undisturbed, []))
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
