"""Two hosts on one machine: network namespaces joined by a cable whose speed `tc` limits (token bucket filter).

Needs root, the iproute2 tools and a kernel that allows all of it; :func:`why_not` tries the whole recipe, down to a message
there and back. Each host is a namespace with one end of a veth pair; what is sent through an end leaves it at the given
rate. When the context closes, whatever still runs on the hosts is killed and everything is taken down. Ports on a host are
its own, so any number is free.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "swveth"
SETUP_SECONDS = 20.0
"""No command that builds a host may take longer; on an idle machine each takes milliseconds."""


class HostError(RuntimeError):
    """A host could not be made, or what ran on it failed or took too long."""


def _do(*command: str) -> str:
    shown = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SETUP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise HostError(f"'{shown}' took more than {SETUP_SECONDS:.0f} s") from None
    except OSError as error:
        raise HostError(f"'{shown}' cannot be run: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise HostError(f"'{shown}' failed: {said[-1] if said else f'exit status {done.returncode}'}")
    return done.stdout


def _take_down(name: str) -> None:
    """Kill what runs on a host and remove it; there may be nothing to remove."""
    for command in (["ip", "netns", "pids", name], ["ip", "netns", "del", name]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SETUP_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        for pid in done.stdout.split() if command[2] == "pids" else ():
            _kill(int(pid))


def _take_down_orphans() -> None:
    """Hosts whose maker was killed before it could take them down; their names tell its process."""
    for line in _do("ip", "netns").splitlines():
        match = re.match(r"swhost-(\d+)-", line)
        if match and not Path("/proc", match.group(1)).exists():
            _take_down(line.split()[0])


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def hosts(rate: str = "1gbit") -> Iterator[tuple[str, str]]:
    """The names of two namespaces that reach each other at ``rate``."""
    _take_down_orphans()
    mark = f"swhost-{os.getpid()}-{secrets.token_hex(2)}"
    names = (f"{mark}a", f"{mark}b")
    limit = ("tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
    before = None
    if threading.current_thread() is threading.main_thread():  # being terminated must not leave anything behind
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", name)
            _do(*inside, "ip", "addr", "add", f"{address}/24", "dev", CABLE)
            _do(*inside, "ip", "link", "set", CABLE, "up")
            _do(*inside, "ip", "link", "set", "lo", "up")
            _do(*inside, "tc", "qdisc", "add", "dev", CABLE, "root", *limit)
        yield names
    finally:
        for name in names:
            _take_down(name)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


_LISTEN = f"""
import socket
with socket.create_server(({ADDRESSES[0]!r}, 7)) as server:
    server.settimeout(15)
    caller = server.accept()[0]
    caller.settimeout(15)
    caller.sendall(caller.recv(9))
"""
_CALL = f"""
import socket, time
end = time.monotonic() + 15
while True:
    try:
        call = socket.create_connection(({ADDRESSES[0]!r}, 7), timeout=15)
        break
    except ConnectionRefusedError:  # the other side is not listening yet
        if time.monotonic() > end:
            raise
        time.sleep(0.05)
call.sendall(b"there")
assert call.recv(9) == b"there"
"""


@functools.cache
def why_not() -> str:
    """Why hosts cannot be emulated here, found by making two and sending a message there and back; empty where they can."""
    if sys.platform != "linux":
        return "emulated hosts need Linux"
    if os.geteuid() != 0:
        return "emulated hosts need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"emulated hosts need {' and '.join(missing)}"
    try:
        with hosts("100mbit") as names:
            run_on_hosts(names, [[sys.executable, "-S", "-c", code] for code in (_LISTEN, _CALL)], 40.0)
    except HostError as error:
        return f"this system does not allow emulated hosts: {error}"
    return ""


def on_host(name: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command on one of the hosts; what it prints goes to ``log`` (a pipe that nobody reads would stop it)."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": CABLE, "TP_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", name, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def run_on_hosts(names: Sequence[str], commands: Sequence[Sequence[str]], seconds: float) -> list[str]:
    """Run one command on each host, side by side; what they printed.

    When one fails, or all have not ended after ``seconds``, the others are killed and :class:`HostError` says what happened.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{number}.log") for number in range(len(names))]
        running = [on_host(name, command, log) for name, command, log in zip(names, commands, logs, strict=True)]
        try:
            end = time.monotonic() + seconds
            while any(process.poll() is None for process in running):
                failed = [number for number, process in enumerate(running) if process.poll()]
                if failed or time.monotonic() > end:
                    break
                time.sleep(0.05)
            states = [process.poll() for process in running]
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
        printed = [log.read_text(errors="replace") for log in logs]
    if any(states):
        number = next(n for n, state in enumerate(states) if state)
        raise HostError(f"host {number} ended with status {states[number]}: {printed[number].strip()[-2000:]}")
    if None in states:
        tails = "; ".join(f"host {number}: {text.strip()[-800:]!r}" for number, text in enumerate(printed))
        raise HostError(f"not done after {seconds:.0f} s; {tails}")
    return printed
