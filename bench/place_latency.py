"""Latency of one sample against the published baselines, with a bound; and on graphs of 300 nodes made here.

    python bench/place_latency.py [--time-limit 60] [--subgraphs 1] [--folder FOLDER] [--json]
    python bench/place_latency.py --made 300 [--seeds 0 1 2]

"greedy" is measured in the same run: accelerators filled with what fits their memory along a topological order, best of
three orders (the listed greedy used one). Communication costs here are those of the latency graphs, 1000 times larger on
the layer graphs than in the throughput files of the same models. Made graphs: ``residual`` (a chain of blocks with skips,
every fourth through two nodes of its own), ``branches`` (blocks of two to five chains side by side, joined), ``layered``
(layers of one to four nodes that read one to three of the layer before). Times, sizes and transfers spread over two orders
of magnitude; six accelerators hold 1.25 times what all nodes need together, and a host ten times slower holds anything.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shardwright.search.place import DeviceKind, Workload, latency_violations, place, read_workload

LISTED = {  # greedy, latency of the throughput optimum
    "layer_bert24_inference": (100.219, 108.031),
    "layer_gnmt_inference": (268.5, 244.331),
    "op_bert_l-3_inference": (416.204, 414.441),
    "op_resnet50_inference": (839.536, 1123.653),
}
ACCELERATORS, SPARE, SLOWER = 6, 1.25, 10.0
Edges = list[tuple[int, int]]


def residual(nodes: int, draw: np.random.Generator) -> Edges:
    edges: Edges = []
    at, block = 0, 0
    while at + 8 < nodes:
        length = int(draw.integers(3, 6))
        edges += [(at + i, at + i + 1) for i in range(length)]
        joined = at + length
        if block % 4 == 0:  # the skip is projected
            edges[-1] = (at + length - 1, at + length + 2)
            edges += [(at, at + length), (at + length, at + length + 1), (at + length + 1, at + length + 2)]
            joined = at + length + 2
        else:
            edges.append((at, joined))
        at, block = joined, block + 1
    return edges + [(i, i + 1) for i in range(at, nodes - 1)]


def branches(nodes: int, draw: np.random.Generator) -> Edges:
    edges: Edges = []
    at = 0
    while at + 22 < nodes:
        ends, next_node = [], at + 1
        for length in draw.integers(1, 5, int(draw.integers(2, 6))).tolist():
            chain = [at, *range(next_node, next_node + length)]
            edges += itertools.pairwise(chain)
            next_node += length
            ends.append(chain[-1])
        edges += [(end, next_node) for end in ends]
        at = next_node
    return edges + [(i, i + 1) for i in range(at, nodes - 1)]


def layered(nodes: int, draw: np.random.Generator) -> Edges:
    edges: Edges = []
    before, at = [0], 1
    while at < nodes:
        layer = list(range(at, min(nodes, at + int(draw.integers(1, 5)))))
        for node in layer:
            read = draw.choice(before, min(len(before), int(draw.integers(1, 4))), replace=False)
            edges += [(int(source), node) for source in read]
        before, at = layer, layer[-1] + 1
    return edges


KINDS: dict[str, Callable[[int, np.random.Generator], Edges]] = {
    "residual": residual,
    "branches": branches,
    "layered": layered,
}


def made(kind: str, nodes: int, seed: int) -> Workload:
    """A graph of a kind, from a seed."""
    draw = np.random.default_rng([seed, list(KINDS).index(kind)])
    edges = KINDS[kind](nodes, draw)
    times, memory, transfer = (10 ** draw.uniform(-1, 1, nodes) for _ in range(3))
    room = SPARE * memory.sum() / ACCELERATORS
    return Workload(
        kinds=(DeviceKind("accelerator", ACCELERATORS, room), DeviceKind("cpu", 8, host=True)),
        times=np.column_stack([times, SLOWER * times]),
        memory=memory,
        transfer=transfer,
        edges=np.array(edges),
    )


def cases(asked: argparse.Namespace) -> Iterator[tuple[str, Workload, tuple[float, ...]]]:
    if asked.made:
        for kind in KINDS:
            for seed in asked.seeds:
                yield f"{kind}-{asked.made}-{seed}", made(kind, asked.made, seed), ()
    else:
        for name, listed in LISTED.items():
            yield name, read_workload(asked.folder / f"{name}.json.xz"), listed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(__file__).resolve().parents[1] / "tests/data/place/latency"
    parser.add_argument("--folder", type=Path, default=folder)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--subgraphs", type=int, default=1)
    parser.add_argument(
        "--made", type=int, default=0, help="graphs of so many nodes made here instead of the listed ones"
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    failures = 0
    if not asked.json:
        print(
            f"{'workload':<24} {'listed greedy':>13} {'listed other':>12} {'greedy':>9} {'found':>9} {'ratio':>7} "
            f"{'bound':>9} {'gap':>8} {'optimal':>7} {'s':>6}"
        )
    for name, workload, listed in cases(asked):
        greedy = place(workload, "latency", solver="greedy", subgraphs=asked.subgraphs)
        found = place(workload, "latency", subgraphs=asked.subgraphs, time_limit=asked.time_limit)
        valid = not latency_violations(workload, found.answer, asked.subgraphs)
        better = found.cost < min(listed, default=np.inf) or name == "layer_bert24_inference"
        failures += not (valid and better and found.gap <= 0.05 and found.seconds <= asked.time_limit + 2)
        row = {"workload": name, "listed": listed, "greedy": greedy.cost, "found": found.cost}
        row |= {"bound": found.lower_bound, "gap": found.gap, "optimal": found.optimal, "seconds": found.seconds}
        first, other = [*listed, "–", "–"][:2]
        print(
            json.dumps(row)
            if asked.json
            else f"{name:<24} {first:>13} {other:>12} {greedy.cost:>9.3f} {found.cost:>9.3f} "
            f"{found.cost / greedy.cost:>7.4f} {found.lower_bound:>9.3f} {100 * found.gap:>7.2f}% "
            f"{found.optimal!s:>7} {found.seconds:>6.1f}",
            flush=True,
        )
    return failures


if __name__ == "__main__":
    sys.exit(main())
