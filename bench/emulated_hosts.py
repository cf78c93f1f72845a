"""Two hosts on one machine: network namespaces joined by a cable whose speed `tc` limits (token bucket filter).

Needs root and the iproute2 tools. Each host is a namespace with one end of a veth pair; what is sent through an end leaves
it at the given rate. Everything is taken down when the context closes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "swveth"


def why_not() -> str:
    """Why hosts cannot be emulated here; empty where they can."""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"emulated hosts need {' and '.join(missing)}"
    name = f"swprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this system does not allow network namespaces"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


@contextmanager
def hosts(rate: str = "1gbit") -> Iterator[tuple[str, str]]:
    """The names of two namespaces that reach each other at ``rate``."""
    names = (f"swhost{os.getpid()}a", f"swhost{os.getpid()}b")

    def do(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    try:
        for name in names:
            do("ip", "netns", "add", name)
        do("ip", "link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", name)
            do(*inside, "ip", "addr", "add", f"{address}/24", "dev", CABLE)
            do(*inside, "ip", "link", "set", CABLE, "up")
            do(*inside, "ip", "link", "set", "lo", "up")
            do(
                *inside,
                "tc",
                "qdisc",
                "add",
                "dev",
                CABLE,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "1mb",
                "latency",
                "100ms",
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def on_host(name: str, command: list[str]) -> subprocess.Popen[str]:
    """Start a command on one of the hosts."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": CABLE, "TP_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
