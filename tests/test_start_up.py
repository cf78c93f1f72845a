"""What starts quickly loads little: told by the modules that are loaded, not by a clock.

PyTorch alone takes more than a second to import, the solvers another. So `import shardwright` loads neither, commands that
only list something load no PyTorch, and a job that runs a plan loads nothing that only searches need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright

SOLVERS = {"highspy", "ortools", "numba"}
SLOW = SOLVERS | {"torch", "numpy", "transformers", "plotly"}

COMMAND = """
import json, sys
from shardwright.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""

TRAINING = """
import json, sys
import torch, shardwright
import torch.distributed as dist

dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
model = shardwright.parallelize(model, shardwright.Plan.load(sys.argv[1]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def loaded(code: str, *arguments: str) -> set[str]:
    """The top-level packages that a new interpreter has loaded once ``code`` is done."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}


def test_importing_loads_nothing_slow() -> None:
    code = "import json, sys, shardwright; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    assert not loaded(code) & (SLOW | {"typer", "rich"})


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["models"], ["plan", "--help"]], ids=" ".join)
def test_commands_that_only_tell_load_nothing_slow(arguments: list[str]) -> None:
    assert not loaded(COMMAND, *arguments) & SLOW


def test_a_job_that_runs_a_plan_loads_no_solver(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    shardwright.plan(model, (torch.ones(4, 8),), cluster="local:1").save(tmp_path / "plan.json")
    there = loaded(TRAINING, str(tmp_path / "plan.json"), str(tmp_path / "store"))
    assert "torch" in there
    assert not there & (SOLVERS | {"typer", "rich"})
