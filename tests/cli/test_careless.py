"""What people type by mistake, and machines that lack something: one sentence, before any work, and nothing is lost."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright import files
from shardwright.cli import main, speak_plainly
from shardwright.errors import FileError


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


PLAN = ("plan", "gpt:small", "--cluster", "2xH100")


@pytest.mark.parametrize(
    "arguments",
    [
        (*PLAN, "--memory", "0"),
        (*PLAN, "--memory", "nan"),
        (*PLAN, "--memory", "-3"),
        (*PLAN, "--time-limit", "nan"),
        (*PLAN, "--time-limit", "-1"),
        (*PLAN, "--batch", str(10**20)),
        (*PLAN, "--max-axes", "0"),
        (*PLAN, "--max-axes", str(10**11)),
        ("plan", "gpt:small", "--cluster", f"{10**30}xH100"),
        ("plan", "gpt:small", "--cluster", f"local:{10**30}"),
        ("plan", "gpt:small", "--cluster", f"{10**9}x{10**9}xH100"),
        ("choose", "x.json", "--time-limit", "nan"),
        ("choose", "x.json", "--time-limit", "1e300"),
        ("place", "x.json", "--time-limit", "1e300"),
        ("place", "x.txt", "--devices", str(10**18)),
        (*PLAN, "--time-limit", "1e300"),
        ("simulate", "x.json", "--width", str(10**12)),
        ("schedule", "--stages", str(10**9)),
        ("schedule", "--microbatches", str(10**13)),
        ("schedule", "--width", str(10**12)),
        ("place", "x.json", "--time-limit", "inf"),
        ("verify", "gpt:small", "--seconds", "nan"),
        ("calibrate", "local:1", "--seconds", "-1"),
        ("calibrate", "local:1", "--seconds", "1e18"),
        (*PLAN, "--stages", str(10**30)),
        (*PLAN, "--stages", "0"),
        (*PLAN, "--stages", "2", "--microbatches", "0"),
        (*PLAN, "--stages", "2", "--microbatches", str(10**30)),
        (*PLAN, "--stages", "2", "--schedule", "nowhere.csv"),
        (*PLAN, "--stages", "2", "--schedule", "no such"),
        (*PLAN, "--stages", "2", "-o", "no/such/folder/plan.json"),
        (*PLAN, "--stages", "2", "--html", "no/such/folder/plan.html"),
        *((*PLAN, "--inference", "-o", path) for path in ("no/such/folder/plan.json", "/")),
        *((*PLAN, "--inference", option, "nan") for option in ("--memory", "--time-limit")),
        (*PLAN, "--inference", "--cache", "-1"),
        (*PLAN, "--inference", "--cache", str(10**30)),
        (*PLAN, "--inference", "--stages", "2"),
        (*PLAN, "--cache", "4"),
        ("report", "x.json", "--measured", "no/such/trace.json"),
        ("run", "x.json", "--profile", "no/such/folder/trace.json", "--", "x.py"),
        ("calibrate", "local:1", "-o", "no/such/folder/device.toml"),
        (*PLAN, "-o", "no/such/folder/plan.json"),
        (*PLAN, "-o", "/"),
        (*PLAN, "-o", "/proc/plan.json"),
    ],
)
def test_numbers_and_paths_that_mean_nothing_are_refused_at_once(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwright.frontend.capture", lambda *a, **k: pytest.fail("work was begun"))
    monkeypatch.setattr("shardwright.cluster.calibrate.run", lambda *a, **k: pytest.fail("work was begun"))
    assert run(monkeypatch, *arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("shardwright: ") and len(message.strip().splitlines()) <= 2, message


@pytest.mark.parametrize(("text", "kind"), [("[" * 10_000, "json"), ("a = " + "[" * 10_000, "toml")])
def test_nesting_without_end_is_one_sentence(
    text: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"deep.{kind}"
    path.write_text(text)
    commands = [("explain", str(path)), ("choose", str(path)), ("place", str(path))]
    for command in commands if kind == "json" else [("clusters", str(path))]:
        assert run(monkeypatch, *command) == 2
        assert "too deeply" in capsys.readouterr().err, command


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("shardwright 0.")


@pytest.mark.parametrize(
    ("problem", "status"), [(KeyboardInterrupt(), 130), (MemoryError(), 2), (OSError(28, "No space left on device"), 2)]
)
def test_interruptions_and_full_machines_are_one_sentence(
    problem: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise problem

    monkeypatch.setattr("shardwright.cluster.preset_names", fail)
    assert run(monkeypatch, "clusters") == status
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.startswith("shardwright: ")


def test_a_terminal_that_knows_only_ascii_gets_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    speak_plainly()
    print("node 2 × gpu 8 – 3 µs → 漢")
    sys.stdout.flush()
    assert written.getvalue() == b"node 2 x gpu 8 - 3 us -> ?\n"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FileError, match="No space left"):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    monkeypatch.undo()
    files.write(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    link = tmp_path / "link.json"
    link.symlink_to(path)
    files.write(link, "newer")
    assert link.is_symlink() and path.read_text() == "newer"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full disk to write to")
def test_a_full_disk_under_standard_output_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "shardwright", "clusters", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert "Traceback" not in done.stderr


MODEL = """
import torch
import sibling_of_the_model

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(sibling_of_the_model.WIDTH, 8)

    def forward(self, x):
        print("forward")
        return Doubled.apply(self.inner(x)).sum()

def build():
    print("built")
    return Net(), (torch.empty(4, sibling_of_the_model.WIDTH),), {}
"""


def test_a_model_in_a_file_may_import_its_siblings_print_and_define_functions_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "careless_model.py").write_text(MODEL)
    (tmp_path / "sibling_of_the_model.py").write_text("WIDTH = 16\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run(monkeypatch, "plan", f"{tmp_path}/careless_model.py:build", "--cluster", "2xH100", "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"] == f"{tmp_path}/careless_model.py:build"


def test_a_plan_for_fewer_devices_says_so_in_table_plan_and_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "slow.toml"
    link = '{name = "wet string", latency = 1e-2, bandwidth = 1e6}'
    slow.write_text(f'[[group]]\ndevices = 2\ndevice = "H100"\nlink = {link}\n')
    small = ("plan", "gpt:small", "--cluster", str(slow), "--recompute", "none", "-o", str(tmp_path / "plan.json"))
    assert run(monkeypatch, *small) == 0
    table = capsys.readouterr().out
    assert "auto on all 2 devices" in table and "--all-devices" in table
    found = next(line for line in table.splitlines() if line.startswith("found"))
    assert "gpu 1" in found
    assert run(monkeypatch, *small, "--stages", "auto") == 0
    assert "1 of 2 devices" in capsys.readouterr().out
    assert run(monkeypatch, "verify", str(tmp_path / "plan.json")) == 2
    assert "verify gpt:small --plan" in capsys.readouterr().err
    assert run(monkeypatch, *small, "--all-devices", "--json") == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["mesh"] == [["gpu", 2]]


@pytest.mark.parametrize("nodes", ["abc", "0", "-1", "9" * 30, "²", ""])
def test_a_number_of_nodes_that_is_none(
    nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardwright.errors import RunError
    from shardwright.runtime.torchrun import _node_count

    with pytest.raises(RunError, match="no number of nodes"):
        _node_count(nodes)
