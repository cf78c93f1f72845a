"""Claim: pricing every option of every edge of an 80-layer Llama on a three-axis mesh takes under 5 seconds.

    python bench/pricing_speed.py

Prices all splits of every operator and all pairs (producer's split, reader's split) of every edge of a Llama with the sizes
of Llama 3 70B on four nodes of eight H200 as a (4, 2, 4) mesh. The reference is the same work without sharing between
equal operators and edges, measured on one layer and scaled.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from shardwright.cluster import Mesh, mesh_of, parse_cluster
from shardwright.costs import conversion_matrix, op_times
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.operators.rules import input_layouts, output_layouts
from shardwright.zoo.reference import resolve

MODEL = "llama:layers={layers},width=8192,heads=64,kv_heads=8,inner=28672"


def splits(rules, sizes: tuple[int, ...]) -> list[tuple]:
    """Every map from axes to loops that leaves no piece empty."""
    found = []
    for split in itertools.product([None, *(loop.name for loop in rules.loops)], repeat=len(sizes)):
        for loop in rules.loops:
            pieces = 1
            for name, size in zip(split, sizes, strict=True):
                pieces *= size if name == loop.name else 1
            if pieces > 1 and not loop.allows(pieces):
                break
        else:
            found.append(split)
    return found


def price(graph: Graph, mesh: Mesh, share: bool) -> tuple[int, int, float]:
    """Options and pairs priced, and processor seconds; ``share`` prices equal operators and edges once."""
    began = time.process_time()  # one thread; other programs may share the machine
    options, edges, node_prices, edge_prices, cache = 0, 0, {}, {}, {}
    for op in graph.ops:
        rules = analyse(op, graph.tensors)
        shapes = tuple((graph.tensors[n].shape, graph.tensors[n].dtype, graph.tensors[n].grad) for n in op.inputs)
        key = (id(rules), shapes) if share else op.name
        if key not in node_prices:
            choice = splits(rules, mesh.sizes)
            layouts = {
                split: (input_layouts(rules, split, len(op.inputs)), output_layouts(rules, split, len(op.outputs)))
                for split in choice
            }
            inputs = [list(dict.fromkeys(layouts[s][0][i] for s in choice)) for i in range(len(op.inputs))]
            outputs = [list(dict.fromkeys(layouts[s][1][i] for s in choice)) for i in range(len(op.outputs))]
            node_prices[key] = op_times(op, rules, graph.tensors, choice, mesh), inputs, outputs
        cache[op.name] = node_prices[key]
        options += len(node_prices[key][0])
    for op in graph.ops:
        for position, name in enumerate(op.inputs):
            maker = graph.producer.get(name)
            if maker is None:
                continue
            tensor = graph.tensors[name]
            sources, targets = cache[maker.name][2][maker.outputs.index(name)], cache[op.name][1][position]
            key = (
                (tensor.shape, tensor.dtype, tensor.grad, tuple(sources), tuple(targets))
                if share
                else (op.name, position)
            )
            if key not in edge_prices:
                edge_prices[key] = conversion_matrix(tensor.shape, tensor.dtype, sources, targets, mesh, tensor.grad)
            edges += edge_prices[key][0].size
    return options, edges, time.process_time() - began


def main() -> None:
    mesh = mesh_of(parse_cluster("4x8xH200"), (4, 2, 4))
    resolved = resolve(MODEL.format(layers=80), batch=4, seq=4096, dtype="bfloat16")
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    for op in graph.ops:
        analyse(op, graph.tensors)  # analysis is the operators' room, not part of pricing
    options, pairs, seconds = price(graph, mesh, share=True)
    small = resolve(MODEL.format(layers=2), batch=4, seq=4096, dtype="bfloat16")
    short = capture(small.model, small.args, small.kwargs)
    _, _, plain = price(short, mesh, share=False)
    scaled = plain * len(graph.ops) / len(short.ops)
    print(f"80-layer Llama, {len(graph.ops)} operators, mesh {mesh.sizes}, prices: {mesh.calibration}")
    print("| | options | layout pairs | processor seconds | ratio |\n|---|--:|--:|--:|--:|")
    print(f"| shared | {options:,} | {pairs:,} | {seconds:.2f} | 1.0 |")
    print(f"| each on its own (2 layers, scaled) | {options:,} | {pairs:,} | {scaled:.2f} | {scaled / seconds:.1f} |")
    assert seconds < 5, "pricing takes longer than 5 s"


if __name__ == "__main__":
    main()
