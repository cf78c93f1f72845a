"""From raw points to a device file and back; collectives fitted; local:N remembers its calibration."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.cluster import Axis, calibration, cases_dispatch, parse_cluster
from shardwright.cluster.calibrate import run
from shardwright.cluster.communication import fit_link, measure_ranks
from shardwright.cluster.fitting import calibrated, device_file
from shardwright.cluster.local import quick_figures, remember
from shardwright.costs import collectives
from shardwright.costs.optimizer import step_seconds
from shardwright.errors import ClusterError


def _raw() -> dict[str, Any]:
    """A machine of 1e12 flops and 1e11 bytes per second whose products reach half of that on small sizes."""
    points = []
    for m in (64.0, 256.0, 1024.0):
        flops = 2 * m**3
        seconds = flops / 1e12 * (2 if m == 64 else 1)
        features = {"m": m, "n": m, "k": m}
        point = {"kernel": "matmul", "step": "forward", "dtype": "float32", "features": features}
        points.append(point | {"flops": flops, "bytes": 12 * m * m, "seconds": seconds})
    for size in (1e4, 1e6, 1e8):
        point = {"kernel": "add", "step": "forward", "dtype": "float32", "features": {"bytes": size}}
        points.append(point | {"flops": 0.0, "bytes": size, "seconds": 1e-6 + size / 1e11})
    rows = [
        {
            "name": "adamw",
            "dtype": "float32",
            "tensors": n,
            "bytes": n * size,
            "host": 1e-4 + 1e-5 * n,
            "device": n * size * 1e-11,
        }
        for n, size in ((1, 2**12), (16, 2**12), (256, 2**12), (16, 2**24))
    ]
    machine = {"name": "Thing", "kind": "cpu", "torch": "2", "date": "2026-01-01", "memory": 10**9}
    dispatch = {"add": [1e-6, 2e-6], "linear": [3e-6, 6e-6], "module": [1e-6, 0.0]}
    return {"machine": machine, "points": points, "dispatch": dispatch, "optimizers": rows}


def test_fitting_finds_peaks_curves_and_the_optimizer(tmp_path: Path) -> None:
    device = calibrated(_raw())
    assert device.peak("float32") == pytest.approx(1e12) and device.bandwidth == pytest.approx(1e11, rel=0.01)
    assert device.profile is not None and device.calibration.startswith("measured 2026-01-01 on Thing")
    curve = device.profile.by_name["matmul/float32/forward"]
    assert list(curve.ratios) == pytest.approx([2, 1, 1], rel=1e-3)
    _, base, each, per_byte = device.profile.optimizer[0]
    assert (base, each, per_byte) == pytest.approx((1e-4, 1e-5, 1e-11), rel=0.01)
    path = tmp_path / "device.toml"
    path.write_text(device_file(_raw()))
    assert parse_cluster(str(path)).device == device


def test_a_processor_updates_tensors_one_after_the_other_each_at_the_speed_of_its_size() -> None:
    """The temporaries of large tensors miss the caches: many small ones are updated faster than one as large."""
    raw = _raw()
    raw["optimizers"] = [
        {"name": "adamw", "dtype": "float32", "tensors": n, "bytes": n * size, "host": n * size * each, "device": 0.0}
        for n, size, each in ((1, 2**14, 4e-10), (16, 2**14, 4e-10), (16, 2**22, 6e-10), (1, 2**26, 2e-9))
    ]
    device = calibrated(raw)
    for sizes, seconds in (([2**26], 2**26 * 2e-9), ([2**22] * 16, 2**26 * 6e-10), ([2**14], 2**14 * 4e-10)):
        assert step_seconds("adamw", sizes, device) == pytest.approx((seconds, 0.0), rel=1e-3)


def test_a_kernel_whose_large_sizes_nobody_had_time_for_is_priced_like_its_kind() -> None:
    """What 16 kB take is nearly all fixed: as a rate it would make a large tensor ten times too dear."""
    raw = _raw()
    point = {"kernel": "gelu", "step": "forward", "dtype": "float32", "features": {"bytes": 16384.0}}
    seen = [*raw["points"], point | {"flops": 0.0, "bytes": 16384.0, "seconds": 1e-5}]
    profile = calibrated(raw | {"points": seen}).profile
    assert profile is not None and "gelu/float32/forward" not in profile.by_name
    seen.append(point | {"features": {"bytes": 1e8}, "flops": 0.0, "bytes": 1e8, "seconds": 3e-3})
    profile = calibrated(raw | {"points": seen}).profile
    assert profile is not None and len(profile.by_name["gelu/float32/forward"].points) == 2


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ClusterError, match="too few"):
        calibrated(_raw() | {"points": _raw()["points"][:2]})


def test_collectives_fitted_are_collectives_priced() -> None:
    points = []
    for kind, rounds in (("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75), ("reduce_scatter", 0.75)):
        for size in (2**12, 2**20, 2**24):
            seconds = 2 * 1e-4 + rounds * size / 1e9
            points.append({"kind": kind, "bytes": size, "ranks": 4, "seconds": seconds})
    link = fit_link(points, "test")
    axis = Axis("cpu", 4, link.latency, link.bandwidth, link.fits, 0.0, link.ratios)
    for point in points:
        assert collectives.SECONDS[point["kind"]](point["bytes"], axis) == pytest.approx(point["seconds"], rel=0.01)
    assert math.isclose(link.bandwidth, 1e9, rel_tol=0.01)


def test_a_bad_moment_makes_no_gather_dearer_than_the_sum_it_is_a_part_of() -> None:
    """Else every plan on that machine gathers by summing zeros: twice the traffic and the memory."""
    points = []
    for kind, rounds in (("all_reduce", 1.0), ("all_gather", 0.5), ("all_to_all", 0.5), ("reduce_scatter", 0.5)):
        for size in (2**12, 2**20, 2**22, 2**24):
            bad = 5.0 if kind in ("all_gather", "reduce_scatter") and size == 2**22 else 1.0
            points.append({"kind": kind, "bytes": size, "ranks": 2, "seconds": bad * (1e-4 + rounds * size / 1e9)})
    link = fit_link(points, "test")
    axis = Axis("cpu", 2, link.latency, link.bandwidth, link.fits, 0.0, link.ratios)
    for size in (2**20, 2**21, 2**22, 2**23, 2**24):
        whole = collectives.SECONDS["all_reduce"](size, axis)
        assert collectives.SECONDS["all_gather"](size, axis) <= 1.001 * whole
        assert collectives.SECONDS["reduce_scatter"](size, axis) <= 1.001 * whole


def test_two_real_processes_time_their_collectives() -> None:
    data = measure_ranks(2, "cpu", 0.0, False)
    kinds = {point["kind"] for point in data["collectives"]}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}
    assert all(point["seconds"] > 0 for point in data["collectives"])
    assert 0.0 <= data["processor_share"] <= 0.9
    assert 0.0 < data["processor_seconds"] < 1.0
    link = fit_link(data["collectives"], "test", (data["processor_share"], data["processor_seconds"]))
    assert (link.processor_share, link.processor_seconds) == (data["processor_share"], data["processor_seconds"])


def test_bandwidth_is_that_of_large_messages_and_latency_that_of_small_ones() -> None:
    """A link that is faster for messages that fit its buffers must not promise that speed for whole layers."""
    points = []
    for kind in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
        for size in (2**10, 2**12, 2**18, 2**22, 2**24, 2**26):
            rounds = 1.0 if kind == "all_reduce" else 0.5
            rate = 1e9 if size < 2**20 else 1e8 if size < 2**26 else 5e7
            points.append({"kind": kind, "bytes": size, "ranks": 2, "seconds": 2e-4 + rounds * size / rate})
    link = fit_link(points, "test")
    axis = Axis("node", 2, 1.0, 1.0, link.fits, 0.0, link.ratios)
    for point in points:
        if not 2**12 < point["bytes"] < 2**22:
            priced = collectives.SECONDS[point["kind"]](point["bytes"], axis)
            assert priced == pytest.approx(point["seconds"], rel=0.1)


def test_measuring_gives_points_and_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    few = functools.partial(cases_dispatch.dispatch_seconds, rounds=1, repeats=2)  # nobody looks at how long they took
    monkeypatch.setattr(cases_dispatch, "dispatch_seconds", few)
    data = calibration.measure(torch.device("cpu"), 2.0, only=["memory float32"])
    assert data["points"] and "add" in data["dispatch"]


def test_local_remembers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert parse_cluster("local:2").device.profile is None
    _, link = quick_figures(2)
    device = calibrated(_raw())
    remember(2, device, link)
    assert parse_cluster("local:2").device == device and parse_cluster("local:3").device.profile is None


@pytest.mark.parametrize("target", ["local:0", "tpu", "cuda"])
def test_what_cannot_be_calibrated(target: str) -> None:
    if target == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ClusterError):
        run(target, 1.0)


def test_the_command_lists_presets_and_meshes() -> None:
    runner = CliRunner()
    listed = json.loads(runner.invoke(app, ["clusters", "--json"]).stdout)
    assert {row["device"] for row in listed} >= {"H200", "K80"}
    shown = json.loads(runner.invoke(app, ["clusters", "2x8xH200", "--json"]).stdout)
    assert shown[0]["mesh"] == "node=2 × gpu=8" and "measured" in shown[0]["calibration"]
    assert "[[group]]" in runner.invoke(app, ["clusters", "8xH200", "--toml"]).stdout


def test_hosts_are_calibrated_under_torchrun_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ClusterError, match="one process on each"):
        run("hosts", 1.0)


def test_what_every_kernel_costs_at_least_is_told_apart_from_its_rate(tmp_path: Path) -> None:
    """Of ratios to ideal seconds alone, those of small shapes differ a thousandfold, and so did what lay between them."""
    data = _raw()
    data["machine"] |= {"kind": "cuda", "memory": 16 * 10**9}
    sizes = (64.0, 256.0, 1024.0, 4096.0)
    data["points"] = [point for point in data["points"] if point["kernel"] != "matmul"] + [
        {
            "kernel": "matmul",
            "step": "forward",
            "dtype": "float32",
            "features": {"m": m, "n": m, "k": m},
            "flops": 2 * m**3,
            "bytes": 12 * m * m,
            "seconds": 5e-6 + 2 * m**3 / 1e12,
        }
        for m in sizes
    ]
    path = tmp_path / "device.toml"
    path.write_text(device_file(data))
    profile = parse_cluster(str(path)).device.profile
    assert profile is not None
    curve = profile.by_name["matmul/float32/forward"]
    assert curve.fixed == pytest.approx(5e-6, rel=0.2)
    between = curve.seconds(np.array([[128.0, 128.0, 128.0]]), np.array([2 * 128.0**3 / 1e12]))
    assert between == pytest.approx(5e-6 + 2 * 128**3 / 1e12, rel=0.1)
