"""Clusters: names, TOML in and out, meshes, and errors that name the key."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import (
    NEVER_CALIBRATED,
    Cluster,
    Device,
    Link,
    Node,
    cluster_to_toml,
    mesh_of,
    meshes,
    parse_cluster,
    preset,
    preset_names,
    toml_text,
)
from shardwright.cluster.hardware import RESERVES
from shardwright.cluster.mesh import across_nodes
from shardwright.cluster.serial import device_from, device_to
from shardwright.errors import ClusterError


def test_presets_are_those_promised_and_cite_their_source() -> None:
    wanted = {"GTX-1080Ti", "RTX-2080Ti", "K80", "V100", "A100-40GB", "A100-80GB", "H100", "H800", "H200", "B200"}
    assert wanted == set(preset_names())
    for name in preset_names():
        node, network = preset(name)
        assert node.device.source and node.link.source and network.source


def test_only_the_measured_preset_is_calibrated() -> None:
    assert preset("H200")[0].device.calibration.startswith("measured ")
    assert all(preset(n)[0].device.calibration.startswith(NEVER_CALIBRATED) for n in preset_names() if n != "H200")


@pytest.mark.parametrize(
    ("text", "nodes", "size"),
    [
        ("8xH200", 1, 8),
        ("4xA100 + 2x4xH100", 3, 12),
        ("4x8xA100-80GB", 4, 32),
        ("16xB200", 2, 16),
        ("H100", 1, 1),
        ("2x4xv100", 2, 8),
        ("local:3", 1, 3),
    ],
)
def test_parse(text: str, nodes: int, size: int) -> None:
    cluster = parse_cluster(text)
    assert (len(cluster.nodes), cluster.size) == (nodes, size)


@pytest.mark.parametrize("text", ["8xH300", "x8xH200", "12xH200", "0xH200", "local:0", "8", "nowhere.toml"])
def test_bad_names_are_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    assert caught.value.remedy


@pytest.mark.parametrize("text", ["8xH200", "4x8xA100-40GB", "local:2", "2x8xK80"])
def test_toml_round_trip(text: str, tmp_path: Path) -> None:
    cluster = parse_cluster(text)
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_to_toml(cluster))
    assert parse_cluster(str(path)) == cluster


CLUSTER = """
[network]
name = "Ethernet"
latency = 1e-5
bandwidth = 1e9
[[group]]
nodes = 2
devices = 4
device = "A100-80GB"
[[group]]
nodes = 1
devices = 4
device = "V100"
host = {name = "CPU", kind = "cpu", memory = 1e11, bandwidth = 1e11, peak_flops = {float32 = 1e12}}
"""


def test_unlike_groups_and_hosts(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(CLUSTER)
    cluster = parse_cluster(str(path))
    assert [g.size for g in cluster.groups()] == [8, 4]
    assert cluster.device.name == "V100" and not cluster.uniform
    host = cluster.nodes[2].host
    assert host is not None and host.kind == "cpu"
    path.write_text(cluster_to_toml(cluster))
    assert parse_cluster(str(path)) == cluster


def test_one_mesh_of_unlike_devices_counts_on_the_slowest_and_on_the_least_memory() -> None:
    """H100 and A100 have the same memory, of which H100 reserves more: all were taken for H100."""
    for text in ("4xA100+4xH100", "4xH100+4xA100"):
        cluster = parse_cluster(text)
        mesh = mesh_of(cluster)
        assert mesh.device.peak("bfloat16") == min(node.device.peak("bfloat16") for node in cluster.nodes)
        assert mesh.device.usable_memory == min(node.device.usable_memory for node in cluster.nodes)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("latency = 1e-5", "latency = -1.0", "latency"),
        ("latency = 1e-5", 'latency = "low"', "latency"),
        ("bandwidth = 1e9", "", "bandwidth"),
        ("nodes = 2", "nodes = 0", "nodes"),
        ("devices = 4", "devicez = 4", "devicez"),
        ('device = "V100"', "", "device"),
        ("float32 = 1e12", "float16 = 1e12", "float32"),
        ("memory = 1e11", "memory = true", "memory"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, old: str, new: str, key: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(CLUSTER.replace(old, new, 1))
    with pytest.raises(ClusterError, match=key):
        parse_cluster(str(path))


def test_broken_toml_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[[group]\n")
    with pytest.raises(ClusterError, match="not TOML"):
        parse_cluster(str(path))


def _cluster(nodes: int, devices: int) -> Cluster:
    device = Device("d", "cuda", 10**9, 1e9, 1e-6, (("float32", 1e12),))
    return Cluster(
        "c", (Node(device, devices, Link("fast", 1e-6, 1e11)),) * nodes, Link("slow", 1e-5, 1e10, shared=True)
    )


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_meshes_cover_the_cluster_slowest_first(nodes: int, devices: int, most: int) -> None:
    found = meshes(_cluster(nodes, devices), most)
    assert len({mesh.names for mesh in found}) == len(found) >= 1
    for mesh in found:
        assert mesh.devices == nodes * devices and 1 <= len(mesh.axes) <= max(most, 1)
        bandwidths = [axis.bandwidth for axis in mesh.axes]
        assert bandwidths == sorted(bandwidths)
        outer = math.prod(axis.size for axis in mesh.axes if across_nodes(axis.name))
        assert len(mesh.axes) == 1 or outer == nodes  # no axis straddles nodes partially
    assert [mesh.coordinates(r) for r in range(nodes * devices) for mesh in found[:1]][-1] == tuple(
        size - 1 for size in found[0].sizes
    )


def test_shared_links_are_divided() -> None:
    mesh = mesh_of(_cluster(2, 4))
    assert mesh.axes[0].bandwidth == 1e10 / 4 and mesh.axes[1].bandwidth == 1e11


def test_asking_for_a_mesh_that_is_not_there() -> None:
    assert mesh_of(_cluster(2, 8), (2, 2, 4)).sizes == (2, 2, 4)
    with pytest.raises(ClusterError, match="no mesh of sizes"):
        mesh_of(_cluster(2, 8), (4, 4))


LEAF = st.one_of(st.integers(-(2**40), 2**40), st.booleans(), st.text(max_size=8), st.floats(allow_nan=False, width=32))
TABLE = st.recursive(
    st.dictionaries(st.text(min_size=1, max_size=6), st.one_of(LEAF, st.lists(st.integers(), max_size=3)), max_size=4),
    lambda inner: st.dictionaries(st.text(min_size=1, max_size=6), st.one_of(LEAF, inner), max_size=3),
    max_leaves=6,
)


@given(TABLE)
@settings(max_examples=80, deadline=None)
def test_toml_text_reads_back(table: dict) -> None:
    assert toml_text.loads(toml_text.dumps(table)) == table


def test_the_share_of_a_processor_travels(tmp_path: Path) -> None:
    device = Device("d", "cpu", 10**9, 1e9, 1e-6, (("float32", 1e12),))
    ratios = (("all_reduce", ((1e6, 1.0), (1e8, 2.0))),)
    link = Link("gloo", 1e-4, 1e8, shared=True, processor_share=0.25, ratios=ratios, processor_seconds=3e-4)
    path = tmp_path / "two.toml"
    path.write_text(cluster_to_toml(Cluster("two", (Node(device, 2, link),) * 2, link)))
    axes = meshes(parse_cluster(str(path)), 2)[0].axes
    assert {(axis.processor_share, axis.processor_seconds) for axis in axes} == {(0.25, 3e-4)}
    assert meshes(parse_cluster(str(path)), 2)[0].axes[0].ratio("all_reduce", [1e3, 1e7, 1e9]) == pytest.approx(
        [1, 1.5, 2]
    )
    path.write_text(path.read_text().replace("processor_share = 0.25", "processor_share = 1.5"))
    with pytest.raises(ClusterError, match="processor_share"):
        parse_cluster(str(path))


def test_a_cluster_file_without_any_group_is_one_sentence(tmp_path) -> None:
    """Found by the fuzzer: the network was taken from the first of no nodes."""
    (tmp_path / "empty.toml").write_text("group = []")
    with pytest.raises(ClusterError, match="has no nodes"):
        parse_cluster(str(tmp_path / "empty.toml"))


@pytest.mark.parametrize("name", preset_names())
def test_presets_leave_room_for_what_is_not_the_plans(name: str) -> None:
    """Context, NCCL and fragmentation are named, positive and kept free, of what CUDA reports as the device's total."""
    device = preset(name)[0].device
    taken = dict(device.reserves)
    assert taken.keys() == RESERVES.keys() and all(size > 0 for size in taken.values())
    total = device.memory - taken["driver"]
    assert device.usable_memory == total - taken["context"] - taken["communication"] - taken["fragmentation"]
    assert 0.8 * device.memory < device.usable_memory < 0.98 * total
    reported = {"A100-40GB": 39.50, "A100-80GB": 79.15, "H100": 79.15, "V100": 15.75, "RTX-2080Ti": 10.73}.get(name)
    assert reported is None or total <= reported * 2**30
    assert device_from(device_to(device), "again").reserves == device.reserves


def test_reserves_are_named_or_one_number_and_leave_something() -> None:
    table = {"name": "x", "memory": 100, "bandwidth": 1.0, "peak_flops": {"float32": 1.0}}
    assert device_from({**table, "reserved": 30}, "x").usable_memory == 70
    assert device_from({**table, "reserved": {"mine": 30, "yours": 20}}, "x").usable_memory == 50
    for wrong in (100, -1, {"mine": "much"}, [1], {"mine": True}, {"mine": 1e300}):
        with pytest.raises(ClusterError):
            device_from({**table, "reserved": wrong}, "x")
