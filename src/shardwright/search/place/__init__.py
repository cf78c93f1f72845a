"""Placing operators on devices: pipelines for throughput, schedules of one sample for latency; exact, bounded or fast."""

from shardwright.search.place.formats import read_profile, read_split, read_workload
from shardwright.search.place.latency import latency_cost, latency_violations
from shardwright.search.place.measure import throughput_cost, violations
from shardwright.search.place.problem import DeviceKind, Placement, Rules, Stage, Workload
from shardwright.search.place.solve import place

__all__ = [
    "DeviceKind",
    "Placement",
    "Rules",
    "Stage",
    "Workload",
    "latency_cost",
    "latency_violations",
    "place",
    "read_profile",
    "read_split",
    "read_workload",
    "throughput_cost",
    "violations",
]
