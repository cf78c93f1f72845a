"""Two emulated hosts: nothing of them is left behind, whatever happens on them (test_killed_ranks.py trains on two)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from emulated_hosts import HostError, hosts, run_on_hosts, why_not


@pytest.fixture(scope="module")
def emulation() -> None:
    """Skips, with the reason, where any part of the emulation is impossible."""
    if reason := why_not():
        pytest.skip(reason)


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def test_nothing_is_left_behind(emulation, tmp_path):
    """One host fails while the other would go on: a prompt error that quotes it, no process and no namespace left."""
    mark = tmp_path / "alive"
    forever = f"import pathlib, time\nwhile True: pathlib.Path({str(mark)!r}).touch(); time.sleep(0.1)"
    began = time.monotonic()
    with pytest.raises(HostError, match=r"host 1 .*out of luck"), hosts() as names:
        commands = [[sys.executable, "-c", code] for code in (forever, "raise SystemExit('out of luck')")]
        run_on_hosts(names, commands, seconds=600.0)
    assert time.monotonic() - began < 300
    assert not _namespaces() & set(names)
    mark.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not mark.exists()


def test_a_host_that_hangs_is_an_error(emulation):
    with hosts() as names, pytest.raises(HostError, match="not done after 1 s"):
        run_on_hosts(names, [[sys.executable, "-c", "import time; time.sleep(60)"]] * 2, seconds=1.0)


def test_what_is_not_allowed_is_named(emulation):
    with pytest.raises(HostError, match=r"tc qdisc add .* failed"), hosts("no-rate-at-all"):
        pass
    assert not any(name.startswith(f"swhost-{os.getpid()}-") for name in _namespaces())


def test_a_terminated_maker_takes_its_hosts_down(emulation, tmp_path):
    ready = tmp_path / "ready"
    code = (
        f"import sys, pathlib; sys.path.insert(0, {str(Path(__file__).resolve().parents[2] / 'bench')!r})\n"
        "from emulated_hosts import hosts, run_on_hosts\n"
        f"with hosts() as names:\n    pathlib.Path({str(ready)!r}).touch()\n"
        "    run_on_hosts(names, [['sleep', '900']] * 2, 900.0)"
    )
    maker = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 300
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert any(name.startswith(f"swhost-{maker.pid}-") for name in _namespaces())
    maker.terminate()
    assert maker.wait() == 143
    assert not any(name.startswith(f"swhost-{maker.pid}-") for name in _namespaces())
