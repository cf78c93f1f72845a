"""``shardwright plan --like``: their configuration beside ours, and nothing of the file passed over in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_commands import run
from shardwright.plans import Plan

TITAN = """
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
teleport_degree = 3
enable_async_tensor_parallel = true
[training]
local_batch_size = 4
seq_len = 32
[activation_checkpoint]
mode = "full"
[metrics]
log_freq = 10
"""
MODEL = "llama:layers=2,width=64,heads=4,kv_heads=2,inner=128,vocab=256"


def test_a_file_is_planned_beside_what_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(TITAN)
    arguments = [
        "plan",
        MODEL,
        "--cluster",
        "4xH100",
        "--like",
        str(tmp_path / "job.toml"),
        "--keep",
        "shard,tensor",
        "--search",
        "megatron",
    ]
    assert run(monkeypatch, *arguments, "-o", str(tmp_path / "plan.json")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "shard 2 (parameters) × tensor 2 with sequence, micro-batches of 4, 8 rows a step, whole recomputation" in said
    )
    assert "torchtitan, changed" in said and "changed: recompute none" in said
    assert "The decisions that make the difference" in said
    assert "parallelism.teleport_degree = 3" in said
    assert "parallelism.enable_async_tensor_parallel" in said and "metrics.log_freq" in said
    theirs, changed, ours = (Plan.load(tmp_path / f"{n}.json") for n in ("plan-like", "plan-changed", "plan"))
    steps = [plan.prediction.step_seconds for plan in (changed, theirs)]
    assert steps == sorted(steps) and ours.signature == theirs.signature and theirs.batch == 8 and theirs.sequence == 32
    assert run(monkeypatch, "diff", str(tmp_path / "plan-like.json"), str(tmp_path / "plan.json")) == 0


def test_as_json_everything_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}, "x": 1}))
    arguments = [
        "plan",
        "gpt:layers=1,width=32,heads=2,vocab=64,seq=8",
        "--search",
        "fsdp",
        "--cluster",
        "2xH100",
        "--like",
        str(tmp_path / "ds.json"),
        "--json",
    ]
    assert run(monkeypatch, *arguments) == 0
    like = json.loads(capsys.readouterr().out)["like"]
    assert like["followed"]["sharding"] == "optimizer" and like["prediction"]["fits"] is True
    assert [remark["key"] for remark in like["configuration"]["unknown"]] == ["x"]
    assert like["differences"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--keep", "tensor"),
        ("--like", "missing.toml"),
        ("--like", "hf"),
        ("--like", "job.ini"),
        ("--like", "{titan}", "--keep", "colour"),
        ("--like", "{titan}", "--devices", "2..4"),
    ],
)
def test_what_means_nothing_is_a_sentence(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(TITAN)
    told = [one.format(titan=tmp_path / "job.toml") for one in arguments]
    assert run(monkeypatch, "plan", "gpt:small", "--cluster", "2xH200", *told) == 2
    error = capsys.readouterr().err
    assert error.startswith("shardwright: ") and "Traceback" not in error and len(error.splitlines()) >= 2
