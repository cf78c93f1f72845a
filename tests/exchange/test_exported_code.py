"""Exported code runs on plain PyTorch, where shardwright cannot be imported, with the numbers of one process."""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.cluster import parse_cluster
from shardwright.exchange import Configuration
from shardwright.exchange.exporting import Export, export
from shardwright.exchange.planning import plan_like
from shardwright.frontend import capture
from shardwright.graph import Graph

HERE = Path(__file__).parent / "plain"
RANKS = 4


def on(model: str, **decisions: Any) -> tuple[str, Configuration]:
    return model, Configuration("plan", **decisions)


PLANS = {
    "ddp": on("tied", replicate=4),
    "ddp, accumulated": on("apart", replicate=4, microbatches=2),
    "fsdp": on("tied", shard=4),
    "fsdp, kept and recomputed": on("apart", shard=4, reshard=False, recompute="blocks", microbatches=2),
    "hybrid shard": on("tied", replicate=2, shard=2),
    "tensor": on("apart", tensor=4),
    "tensor and sequence": on("apart", tensor=4, sequence=True),
    "2-D": on("tied", shard=2, tensor=2),
    "2-D with sequence": on("apart", shard=2, tensor=2, sequence=True, recompute="blocks"),
    "replicas of tensor": on("apart", replicate=2, tensor=2, sequence=True),
    "1f1b and fsdp": on("apart", pipeline=2, shard=2, microbatches=4),
    "1f1b and tensor": on("apart", pipeline=2, tensor=2, microbatches=4),
    "transformers' llama in 2-D": on("llama", shard=2, tensor=2, sequence=True),
    "transformers' llama, 1f1b and fsdp": on("llama", pipeline=2, shard=2, microbatches=4),
    "transformers' gpt2, tensor": on("gpt2", replicate=2, tensor=2),
    "transformers' gpt2, 1f1b": on("gpt2", pipeline=4, microbatches=4),
    "gpipe, tied over stages": on("tied", pipeline=4, schedule="gpipe", microbatches=4),
}
TIED = {"tied": ("head.weight",), "gpt2": ("lm_head.weight",)}
"""Second names of parameters."""
QUICK = ("ddp, accumulated", "hybrid shard", "2-D with sequence", "1f1b and fsdp", "gpipe, tied over stages")


@cache
def graph(model: str) -> Graph:
    built, args, *more = runpy.run_path(str(HERE / "models.py"))[model]()
    return capture(built, args, dict(*more))


@cache
def exported(name: str) -> Export:
    model, c = PLANS[name]
    followed = plan_like(graph(model), parse_cluster(f"{RANKS}xH100"), c)
    return export(followed.plan, to="pytorch", graph=graph(model), price=False)


@cache
def of_one_process(model: str, steps: int) -> dict[str, Any]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        built, args, *more = runpy.run_path(str(HERE / "models.py"))[model]()
    finally:
        torch.set_default_dtype(before)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-2)
    losses, gradients = [], {}
    for number in range(steps):
        optimizer.zero_grad()
        loss = built(*args, **dict(*more))
        loss = getattr(loss, "loss", loss)
        loss.backward()
        losses.append(float(loss.detach()))
        if number == 0:
            gradients = {n: p.grad.clone() for n, p in built.named_parameters(remove_duplicate=False)}
        optimizer.step()
    updated = {n: p.detach() for n, p in built.named_parameters(remove_duplicate=False)}
    return {"losses": losses, "gradients": gradients, "updated": updated}


def without_shardwright(folder: Path) -> dict[str, str]:
    """An environment in which importing shardwright fails, however it was installed."""
    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import sys\n\n\nclass Blocked:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'shardwright':\n            raise ImportError('blocked')\n\n\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PYTHONPATH": str(blocked), "OMP_NUM_THREADS": "1"}


def run_jobs(names: tuple[str, ...], folder: Path, seconds: float) -> None:
    jobs = []
    for number, name in enumerate(names):
        program = folder / f"exported_{number}.py"
        exported(name).save(program)
        jobs.append({"name": str(number), "program": str(program), "model": f"{HERE / 'models.py'}:{PLANS[name][0]}"})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = without_shardwright(folder)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "job.py"), str(rank), str(RANKS), str(folder)],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(said)


def compare(names: tuple[str, ...], folder: Path) -> None:
    for number, name in enumerate(names):
        found = [torch.load(folder / f"{number}.{rank}.pt") for rank in range(RANKS)]
        one = of_one_process(PLANS[name][0], len(found[0]["losses"]))
        held = set()
        # Transformers takes norms and losses in float32 whatever the model is in.
        close = 1e-5 if "transformers" in name else 1e-9
        for rank in found:
            assert rank["losses"] == pytest.approx(one["losses"], rel=close), name
            for what in ("gradients", "updated"):
                for path, tensor in rank[what].items():
                    torch.testing.assert_close(tensor, one[what][path], rtol=1e-7, atol=close, msg=f"{name}: {path}")
            held |= set(rank["gradients"])
        untied = {path for path in one["gradients"] if path not in TIED.get(PLANS[name][0], ())}
        assert held >= untied, f"{name}: {untied - held}"


def test_exported_code_has_the_numbers_of_one_process(tmp_path):
    run_jobs(QUICK, tmp_path, 240)
    compare(QUICK, tmp_path)


@pytest.mark.long
def test_every_plan_exported_has_the_numbers_of_one_process(tmp_path):
    run_jobs(tuple(PLANS), tmp_path, 900)
    compare(tuple(PLANS), tmp_path)


@pytest.mark.parametrize("name", [name for name in PLANS if "transformers" not in name])
def test_exported_code_is_short_and_whole(name):
    text = exported(name).text
    tree = ast.parse(text)
    assert len(text.splitlines()) < 260 and max(map(len, text.splitlines())) <= 120
    imported = {
        a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names
    }
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert imported <= used and not any("shardwright" in name for name in imported)
