"""Devices, links, meshes; presets; calibration of a real machine."""

from shardwright.cluster.hardware import NEVER_CALIBRATED, Cluster, Device, Link, Node, part_of
from shardwright.cluster.mesh import Axis, Mesh, mesh_of, meshes, meshes_and_line
from shardwright.cluster.parse import parse_cluster, preset, preset_names
from shardwright.cluster.profile import Curve, Profile
from shardwright.cluster.serial import cluster_to_toml

__all__ = [
    "NEVER_CALIBRATED",
    "Axis",
    "Cluster",
    "Curve",
    "Device",
    "Link",
    "Mesh",
    "Node",
    "Profile",
    "cluster_to_toml",
    "mesh_of",
    "meshes",
    "meshes_and_line",
    "parse_cluster",
    "part_of",
    "preset",
    "preset_names",
]
