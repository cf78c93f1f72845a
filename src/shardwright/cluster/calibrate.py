"""One call that calibrates what a user names: this machine's GPU, or its CPU as N processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.cluster import calibration, communication, toml_text
from shardwright.cluster.calibration import Progress
from shardwright.cluster.fitting import calibrated
from shardwright.cluster.hardware import Device, Link
from shardwright.cluster.local import cache_file, remember
from shardwright.cluster.serial import device_to, link_to
from shardwright.errors import ClusterError


@dataclass(frozen=True)
class Calibrated:
    """The device file's text, the raw points and a sentence for the user."""

    text: str
    raw: dict[str, Any]
    summary: str


def _cuda(seconds: float, report: Progress) -> tuple[Device, Link | None, dict[str, Any]]:
    data = calibration.measure(torch.device("cuda"), seconds, report)
    link = None
    if torch.cuda.device_count() > 1:
        measured = communication.measure_ranks(torch.cuda.device_count(), "cuda", 0.0, False, report)
        data |= measured
        link = communication.fit_link(measured["collectives"], "NCCL")
    return calibrated(data), link, data


def run(target: str, seconds: float, report: Progress = lambda share, what: None) -> Calibrated:
    """Calibrate ``auto``, ``cuda``, ``cpu`` or ``local:N`` (whose result is also cached)."""
    if target == "auto":
        target = "cuda" if torch.cuda.is_available() else "local:1"
    kept = ""
    link: Link | None
    if target == "cuda":
        if not torch.cuda.is_available():
            raise ClusterError("there is no CUDA device to calibrate.", "Calibrate the CPU with 'local:1'.")
        device, link, raw = _cuda(seconds, report)
    elif match := re.fullmatch(r"local(?::(\d+))?", target):
        processes = int(match.group(1) or 1)
        if processes < 1:
            raise ClusterError(f"{target!r} has no processes.", "Write 'local:1' or more.")
        device, link, raw = communication.calibrate_local(processes, seconds, report)
        kept = f"; kept in {remember(processes, device, link)}"
    else:
        raise ClusterError(f"cannot calibrate {target!r}.", "Calibrate 'auto', 'cuda' or 'local:N'.")
    table: dict[str, Any] = {"device": device_to(device)}
    if link is not None:
        table["link"] = link_to(link)
    best = ", ".join(f"{dtype} {rate / 1e12:.3g} Tflop/s" for dtype, rate in device.peak_flops)
    summary = f"{device.name}: {device.calibration}; {best}; memory {device.bandwidth / 1e9:.0f} GB/s{kept}"
    return Calibrated(toml_text.dumps(table), raw, summary)


def ensure_local(target: str, seconds: float = 40.0, report: Progress = lambda share, what: None) -> bool:
    """Calibrate ``local:N`` the first time it is planned for on this machine; whether that was needed.

    Anything else than ``local:N`` is left alone.

    >>> ensure_local("8xH200")
    False
    """
    match = re.fullmatch(r"local(?::(\d+))?", target.strip())
    if match is None or cache_file(int(match.group(1) or 1)).exists():
        return False
    run(target.strip(), seconds, report)
    return True
