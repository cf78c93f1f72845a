"""``shardwright fits``: the answer, what takes the memory, and what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_commands import run
from cli.test_like import MODEL, TITAN

SMALL = "gpt:layers=2,width=256,heads=8,vocab=512,seq=64"


def test_it_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "fits", SMALL, "--cluster", "4xH100") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "It fits as" in said and "One such device would do" in said and "fsdp" in said
    assert "81.1 GB may be used of 85.9 (kept free: driver 0.92, context 0.65, communication 1.50" in said


def test_it_does_not_fit_and_what_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fits", SMALL, "--cluster", "4xH100", "--batch", "16", "--search", "data-parallel", "--memory", "0.09"]
    assert run(monkeypatch, *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "It does not fit: data-parallel needs" in said and "What makes data-parallel fit, the cheapest first" in said
    assert run(monkeypatch, *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["fits"] and told["usable_bytes"] == 9e7 and told["batch"] == 16
    for row in (*told["ways"], *told["changes"]):
        assert row["bytes"] == pytest.approx(sum(row["kinds"].values()))
    assert all(row["fits"] for row in told["changes"]) and told["changes"]


def test_their_file_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(TITAN)
    assert run(monkeypatch, "fits", MODEL, "--cluster", "4xH100", "--like", str(tmp_path / "job.toml")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "It fits as" in said and "8 rows a step" in said and "parallelism.teleport_degree = 3" in said


def test_what_is_counted_as_their_engine_does_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    degrees = "data_parallel_shard_degree = 2\npipeline_parallel_degree = 2\n"
    (tmp_path / "job.toml").write_text(f"[training]\nlocal_batch_size = 4\n[parallelism]\n{degrees}")
    words = ["fits", MODEL, "--cluster", "4xH100", "--like", str(tmp_path / "job.toml")]
    assert run(monkeypatch, *words) == 0
    assert "Counted as torchtitan does it" in " ".join(capsys.readouterr().out.split())
    assert run(monkeypatch, *words, "--json") == 0
    assert "gathered parameters" in json.loads(capsys.readouterr().out)["ways"][0]["counted"]


def test_context_parallelism_of_a_file_is_counted_as_a_ring_and_compiled_steps_keep_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(
        "[training]\nlocal_batch_size = 4\nseq_len = 64\n[parallelism]\ndata_parallel_shard_degree = 2\n"
        "context_parallel_degree = 2\n"
    )
    words = ["fits", MODEL, "--cluster", "4xH100", "--like", str(tmp_path / "job.toml"), "--json"]
    assert run(monkeypatch, *words) == 0
    (theirs,) = (way for way in json.loads(capsys.readouterr().out)["ways"] if way["reserved_bytes"])
    assert theirs["counted"].startswith("Context parallelism is counted as that engine does it: 2 ranks share")
    assert (theirs["configuration"]["shard"], theirs["configuration"]["context"]) == (4, 1)
    assert run(monkeypatch, "fits", SMALL, "--cluster", "4xH100", "--compiled", "--json") == 0
    assert {way["configuration"]["recompute"] for way in json.loads(capsys.readouterr().out)["ways"]} == {"light"}


def test_what_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--search", "magic"), ("--optimizer", "magic"), ("--memory", "0"), ("--like", "no.toml")):
        assert run(monkeypatch, "fits", SMALL, "--cluster", "4xH100", *words) == 2
        assert "Traceback" not in capsys.readouterr().err
