"""Caches save time and decide nothing: missing, read-only, damaged or somebody else's, everything works without them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from shardwright import caches, jit
from shardwright.cluster import communication, parse_cluster
from shardwright.cluster.calibrate import ensure_local, run
from shardwright.cluster.local import quick_figures, remember, remembered


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(caches.VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr("shardwright.cluster.local._MEASURED", {})
    caches.say_once.cache_clear()
    jit._folder.cache_clear()
    yield tmp_path / "kept"
    jit._folder.cache_clear()


def test_one_variable_moves_all_caches_and_an_empty_one_moves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(caches.root()).endswith("kept")
    monkeypatch.delenv(caches.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/somebody")
    assert caches.root() == Path("/somebody/.cache/shardwright")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says to ignore it
    assert caches.root() == Path("/somebody/.cache/shardwright")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert caches.root() == Path("/elsewhere/shardwright")


def test_what_is_kept_is_read_and_nobody_else_can_write_there(private: Path) -> None:
    assert caches.keep("things", "a.json", "{}") == private / "things" / "a.json"
    assert caches.read_cached("things", "a.json") == b"{}"
    for path in (private, private / "things", private / "things" / "a.json"):
        assert not path.stat().st_mode & 0o022


def test_where_nothing_can_be_kept_it_is_said_once(
    private: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert caches.keep("things", "a.json", "{}") is None
        assert caches.keep("things", "b.json", "{}") is None
        assert caches.read_cached("things", "a.json") is None
    assert len(caplog.records) == 1
    assert caches.VARIABLE in caplog.text
    device, link = quick_figures(3)
    assert remember(3, device, link) is None  # a calibration is still good for this process
    assert remembered(3) == (device, link)
    assert not ensure_local("local:3")


def test_what_was_calibrated_on_a_busy_machine_is_calibrated_again_on_a_quiet_one(monkeypatch) -> None:
    load, made = [7.5, 0.0, 0.0], []
    monkeypatch.setattr("os.getloadavg", lambda: load)
    monkeypatch.setattr("shardwright.cluster.local.cores", lambda: 2)
    monkeypatch.setattr(communication, "calibrate_local", lambda n, *_: made.append(n) or (*quick_figures(n), {}))
    assert "busy (load 7.5 on" in run("local:3", 1.0).summary
    assert not ensure_local("local:3"), "busy still: what there is has to do"
    load[0] = 0.2
    assert ensure_local("local:3") and not ensure_local("local:3")
    assert made == [3, 3] and remembered(3) is not None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_files_and_folders_of_others_are_not_believed(private: Path, caplog: pytest.LogCaptureFixture) -> None:
    caches.keep("things", "a.json", "{}")
    os.chown(private / "things" / "a.json", 12345, 12345)
    assert caches.read_cached("things", "a.json") is None
    assert "another user" in caplog.text
    caches.keep("things", "b.json", "{}")
    os.chown(private / "things", 12345, 12345)
    assert caches.read_cached("things", "b.json") is None
    assert caches.keep("things", "c.json", "{}") is None


def test_a_file_that_others_can_change_and_a_link_are_not_believed(private: Path, tmp_path: Path) -> None:
    caches.keep("things", "a.json", "{}")
    os.chmod(private / "things" / "a.json", 0o666)
    assert caches.read_cached("things", "a.json") is None
    (tmp_path / "theirs.json").write_text("{}")
    os.symlink(tmp_path / "theirs.json", private / "things" / "link.json")
    assert caches.read_cached("things", "link.json") is None


@pytest.mark.parametrize("damage", ["", "device = 3", "[device]\nname = 'x'", "a = " + "[" * 5000, "\x00\x01"])
def test_a_damaged_calibration_is_named_and_replaced(
    private: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = remember(2, *quick_figures(2))
    assert place is not None
    place.write_text(damage)
    place.chmod(0o600)
    assert parse_cluster("local:2").size == 2  # with guessed figures
    assert "is damaged" in caplog.text and place.name in caplog.text
    assert not place.exists()


def _kernel():
    @jit.kernel()
    def doubled(x):
        return 2.0 * x

    return doubled


def test_kernels_are_kept_and_a_torn_file_is_compiled_again(private: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _kernel()(np.float64(2.0)) == 4.0
    kept = [path for path in (private / jit.KIND).rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    again = _kernel()
    assert again(np.float64(2.0)) == 4.0
    assert sum(again.stats.cache_hits.values()) == 1
    for suffix in (".nbc", ".nbi"):
        for path in (private / jit.KIND).rglob(f"*{suffix}"):
            path.write_bytes(path.read_bytes()[:20])
        assert _kernel()(np.float64(3.0)) == 6.0
        assert "is damaged" in caplog.text
        caches.say_once.cache_clear()
        caplog.clear()
    assert _kernel()(np.float64(3.0)) == 6.0


def test_of_several_processes_one_compiles_and_the_others_wait(
    private: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _kernel()(np.float64(2.0)) == 4.0
    kept = {path: path.read_bytes() for path in (private / jit.KIND).rglob("*.nb?")}
    for path in kept:
        path.unlink()

    class AfterAnother(jit._Turn):
        def begin(self, folder: Path) -> None:
            super().begin(folder)
            for path, content in kept.items():
                path.write_bytes(content)

    monkeypatch.setattr(jit, "_TURN", AfterAnother())
    again = _kernel()
    assert again(np.float64(2.0)) == 4.0 and sum(again.stats.cache_hits.values()) == 1
    first, second = jit._Turn(), jit._Turn()
    second.patience = 0.1
    first.begin(tmp_path)
    second.begin(tmp_path)
    assert second.patience == 0.0  # it has waited long enough, and goes on without
    second.end()
    first.end()
    third = jit._Turn()
    third.begin(tmp_path)
    assert third._taken() and third.patience == jit.PATIENCE
    third.end()


def test_no_kernel_is_compiled_in_another_way() -> None:
    """numba's own cache ends the program where it cannot be written (the scheduler's kernels once used it)."""
    package = Path(jit.__file__).parent
    assert [path.name for path in package.rglob("*.py") if "njit" in path.read_text()] == ["jit.py"]


def test_kernels_compile_without_any_cache(private: Path) -> None:
    private.write_text("a file where the folder should be")
    assert _kernel()(np.float64(2.0)) == 4.0


def test_one_kernel_of_somebody_else_spoils_the_folder(private: Path) -> None:
    assert _kernel()(np.float64(2.0)) == 4.0
    for path in (private / jit.KIND).rglob("*.nbc"):
        path.chmod(0o666)
    jit._folder.cache_clear()
    assert jit._folder() is None
