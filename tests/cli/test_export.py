"""``shardwright export``: the file, what is lost and its price, on the terminal and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_commands import run
from shardwright.exchange import read_configuration

MODEL = "llama:layers=2,width=64,heads=4,kv_heads=2,inner=128,vocab=256,batch=8,seq=32"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, "plan", MODEL, "--cluster", "4xH100", "--search", "zero-1", "-o", str(path)) == 0
    return path


def test_a_plan_is_written_for_another_engine(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    assert run(monkeypatch, "export", str(plan), "--to", "torchtitan", "-o", str(path)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Lost on the way: sharding = optimizer: parameters too" in said
    assert "Predicted price: " in said and "written to" in said
    assert read_configuration(path).on(4, 8).shard == 4
    assert run(monkeypatch, "export", str(plan), "--to", "torchtitan") == 0
    assert "data_parallel_shard_degree = 4" in capsys.readouterr().out


def test_json_has_the_file_the_losses_and_the_price(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "export", str(plan), "--to", "megatron", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert "--use-distributed-optimizer" in said["file"] and said["lost"] == []
    assert said["price_seconds"] == pytest.approx(0.0, abs=1e-9)


def test_nothing_to_express_is_a_sentence(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "export", str(plan), "--to", "hf") == 2
    assert "cuts no weights by features" in capsys.readouterr().err
