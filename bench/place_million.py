"""A random layered graph of a million nodes on 64 devices, placed by the heuristics in under 60 seconds.

    python bench/place_million.py [--nodes 1000000] [--width 500] [--devices 64]

The reference in the same run is the greedy split into equal shares along a topological order. The bound is that of the
work spread evenly, without transfers. Two graphs: transfers of a tenth of a node's time on average, and of ten times it.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import numpy as np

from shardwright.search.place import DeviceKind, Workload, throughput_cost, violations
from shardwright.search.place.baselines import equal_shares
from shardwright.search.place.heuristics import place_heuristically


def layered(nodes: int, width: int, devices: int, transfer: float = 0.1, seed: int = 0) -> Workload:
    """Layers of ``width`` nodes; every node reads one to three of the layer before, four in five of them close by."""
    rng = np.random.default_rng(seed)
    layer = np.arange(nodes) // width
    target = np.repeat(np.arange(nodes), rng.integers(1, 4, nodes))
    target = target[layer[target] > 0]
    near = np.clip(target % width + rng.integers(-2, 3, len(target)), 0, width - 1)
    far = rng.integers(0, width, len(target))
    source = (layer[target] - 1) * width + np.where(rng.random(len(target)) < 0.8, near, far)
    return Workload(
        kinds=(DeviceKind("accelerator", devices, memory=nodes / devices),),
        times=rng.exponential(1.0, (nodes, 1)),
        memory=rng.random(nodes),
        transfer=rng.exponential(transfer, nodes),
        edges=np.unique(np.stack([source, target], axis=1), axis=0),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--devices", type=int, default=64)
    arguments = parser.parse_args()
    place_heuristically(layered(2_000, 20, 4))
    print(f"{arguments.nodes:,} nodes, {arguments.devices} devices")
    print(f"{'transfer':>8} {'':<14} {'load':>12} {'to bound':>9} {'ratio':>7} {'seconds':>8} {'CPU s':>7}")
    failures = 0
    for transfer in (0.1, 10.0):
        workload = layered(arguments.nodes, arguments.width, arguments.devices, transfer)
        shares = equal_shares(workload)
        share_cost = throughput_cost(workload, shares)
        processor = time.process_time()
        found = place_heuristically(workload)
        processor = time.process_time() - processor
        print(
            f"{transfer:>8} {'equal shares':<14} {share_cost:>12.2f} {share_cost / found.lower_bound:>9.4f} {1:>7.4f}"
        )
        print(
            f"{'':>8} {'heuristic':<14} {found.cost:>12.2f} {found.cost / found.lower_bound:>9.4f} "
            f"{found.cost / share_cost:>7.4f} {found.seconds:>8.2f} {processor:>7.2f}",
            flush=True,
        )
        failures += len(violations(workload, found.answer)) + (found.seconds > 60)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:.0f} MB, {failures} failures")
    return failures


if __name__ == "__main__":
    sys.exit(main())
