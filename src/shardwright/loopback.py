"""Jobs of one machine meet on its loopback interface: nobody else on the network can reach their stores or their ranks.

PyTorch's key-value store, through which ranks find each other, listens on every interface whatever address it is given, and
takes what anybody writes into it. Where all ranks are processes of this machine, it is therefore given a socket that listens
on 127.0.0.1, and gloo is told to use the loopback interface. As a program (``python -m shardwright.loopback script.py
arguments``) this runs a script so, as one of the ranks of such a job.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from shardwright._torch_compat import listen_on_loopback

ADDRESS = "127.0.0.1"


def loopback_environment() -> Mapping[str, str]:
    """What tells gloo to use the loopback interface, unless the user has named one."""
    found = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {} if found is None or "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": found}


def stay_local() -> None:
    """From now on this process shows its stores and gloo's connections to no other machine."""
    os.environ.update(loopback_environment())
    listen_on_loopback()


def _run(arguments: list[str]) -> None:
    """A script, as ``python script.py`` would run it."""
    stay_local()
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _run(sys.argv[1:])
