"""Readers: the placement JSON and its extension, PipeDream profiles with their published answers, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import ProblemError
from shardwright.search.place.contiguous import place_contiguous
from shardwright.search.place.formats import read_profile, read_workload
from shardwright.search.place.measure import violations
from shardwright.search.place.problem import Rules


def small() -> dict[str, Any]:
    node = {"supportedOnFpga": 1, "cpuLatency": 20.0, "fpgaLatency": 2.0, "isBackwardNode": 0, "size": 5.0}
    return {
        "maxSizePerFPGA": 100,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [{"id": 7, "colorClass": 3, **node}, {"id": 9, "name": "b", **node, "supportedOnFpga": 0}],
        "edges": [{"sourceId": 7, "destId": 9, "cost": 0.5}],
    }


def written(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "workload.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_reads_the_published_format(tmp_path: Path) -> None:
    workload = read_workload(written(tmp_path, small()))
    assert workload.times.tolist() == [[2.0, 20.0], [float("inf"), 20.0]]
    assert workload.transfer.tolist() == [0.5, 0.0]
    assert workload.edges.tolist() == [[0, 1]]
    assert [kind.name for kind in workload.kinds] == ["accelerator", "cpu"]
    assert workload.kinds[1].pays == 0.0 and workload.kinds[0].room == 100
    assert workload.label(1) == "b" and workload.label(0) == "7"


def test_reads_unlike_accelerators(tmp_path: Path) -> None:
    data = small()
    for key in ("maxSizePerFPGA", "maxFPGAs", "maxCPUs"):
        del data[key]
    data["kinds"] = [{"name": "fast", "count": 1, "memory": 10.0}, {"name": "slow", "count": 3, "transfer_factor": 2.0}]
    data["nodes"][0]["times"], data["nodes"][1]["times"] = [1.0, 4.0], [None, 3.0]
    found = place_contiguous(read_workload(written(tmp_path, data)))
    assert found.cost == pytest.approx(4.0)  # the slow device: 3 + 2 x 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["edges"].append({"sourceId": 7, "destId": 1, "cost": 0.5}), "does not exist"),
        (lambda d: d["edges"].append({"sourceId": 7, "destId": 7, "cost": 0.7}), "out-edges"),
        (lambda d: d["nodes"].append(d["nodes"][0]), "same id"),
        (lambda d: d.pop("maxFPGAs"), "not a placement workload"),
        (lambda d: d.update(maxCPUs=0), "none of the available"),
        (lambda d: d["nodes"][0].update(cpuLatency=-1.0), "negative"),
    ],
)
def test_refuses_what_makes_no_sense(tmp_path: Path, change: Any, message: str) -> None:
    data = small()
    change(data)
    with pytest.raises(ProblemError, match=message) as caught:
        read_workload(written(tmp_path, data))
    assert caught.value.remedy


def test_refuses_what_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="is not JSON"):
        read_workload(written(tmp_path, "{"))


@pytest.mark.parametrize(
    ("name", "seconds", "replicas"),
    [
        ("vgg16", 0.1763, [3, 1]),
        ("alexnet", 0.03246, [3, 1]),
        ("resnet50", 0.15199, [2, 2]),
        ("gnmt", 0.025868, [1, 1, 1, 1]),
    ],
)
def test_pipedreams_answers(name: str, seconds: float, replicas: list[int], published: Path) -> None:
    """With transfers overlapped the published times and replication; without transfers never worse."""
    path = published / "pipedream" / f"{name}.txt"
    workload = read_profile(path, devices=4, bandwidth=1.25e9)
    found = place_contiguous(workload, Rules(replicate=True, overlap=True))
    assert found.cost == pytest.approx(seconds, rel=1e-3)
    assert [len(stage.devices) for stage in found.answer.stages] == replicas
    assert violations(workload, found.answer) == []
    silent = read_profile(path, devices=4, bandwidth=1.25e9, transfers=False)
    assert place_contiguous(silent, Rules(replicate=True)).cost <= seconds * (1 + 1e-3)


def test_refuses_a_broken_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    path.write_text("node1 -- ReLU -- forward_compute_time=1.0, backward_compute_time=2.0\n\tnode1 -- node2\n")
    with pytest.raises(ProblemError, match="node2"):
        read_profile(path, devices=2, bandwidth=1.0)
    path.write_text("what is this")
    with pytest.raises(ProblemError, match="neither"):
        read_profile(path, devices=2, bandwidth=1.0)
