"""Choice problems of the contest's kind that nobody tuned on: made here, from a seed; bound and answer as time goes on.

    python bench/choose_random.py [--seeds 0 1 2 3] [--time-limit 20] [--json]

A problem is a stack of layers in forward and backward order. Operators of a layer are a chain with skips; each has the
layouts of a two-axis mesh as options, pays for work it does not share, and pays along edges for every change of layout
(forbidden where the layout must follow). Equal layers share their weights' layouts, so that reductions leave few nodes,
each of which stands for many: small and knotted, as the contest's D. Memory lives from forward to backward; the limit is
a little above what the leanest choice uses. Quality is shown at a tenth, a third and the whole of the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from shardwright.search.choose import Edge, Problem, Usage, evaluate, solve

LAYOUTS = [(a, b) for a in range(4) for b in range(4) if a == 0 or a != b]  # axis -> 0: whole, 1..3: a dim is cut


def made(seed: int) -> Problem:
    """A problem of a few thousand nodes."""
    draw = np.random.default_rng(seed)
    layers, ops, kinds = int(draw.integers(12, 48)), int(draw.integers(8, 24)), int(draw.integers(1, 4))
    cut = np.array([(4 if a else 1) * (2 if b else 1) for a, b in LAYOUTS], dtype=float)
    change = np.array([[0.0 if x == y else (x[0] != y[0]) * 3.0 + (x[1] != y[1]) for y in LAYOUTS] for x in LAYOUTS])
    costs: list[np.ndarray] = []
    edges: list[Edge] = []
    usages: list[Usage] = []
    follow = np.where(np.eye(len(LAYOUTS)) > 0, 0.0, np.inf)
    size = draw.integers(1, 200, (kinds, ops)) * 1000.0
    work = draw.integers(1, 400, (kinds, ops)) * 100.0
    only = draw.random((kinds, ops, len(LAYOUTS))) < 0.75  # layouts that an operator can be computed in
    only[:, :, 0] = True
    skips = [(int(a), int(b)) for a, b in np.sort(draw.integers(0, ops, (ops // 2, 2)), axis=1) if b > a + 1]
    end = 2 * layers * ops
    weights = [[_node(costs, np.zeros(len(LAYOUTS))) for _ in range(ops)] for _ in range(kinds)]
    for kind in range(kinds):
        for op in range(ops):
            usages.append(Usage(weights[kind][op], 0, end, np.round(8 * layers / kinds * size[kind, op] / cut)))
    before: list[int] = []
    for layer in range(layers):
        kind = layer % kinds
        nodes = []
        for op in range(ops):
            price = np.where(only[kind, op], np.round(work[kind, op] / cut), 50 * work[kind, op])
            node = _node(costs, price)
            now = layer * ops + op
            usages.append(Usage(node, now, end - now, np.round(size[kind, op] / cut)))
            edges.append(Edge(node, weights[kind][op], np.round(change * size[kind, op] / 40)))
            nodes.append(node)
        for a, b in [*((op, op + 1) for op in range(ops - 1)), *skips]:
            edges.append(Edge(nodes[a], nodes[b], np.round(change * size[kind, a] / 10)))
        if before:
            edges.append(Edge(before[-1], nodes[0], np.round(change * size[kind, 0] / 10)))
            if layer % kinds == 0 and draw.random() < 0.5:
                edges.append(Edge(before[0], nodes[0], follow if draw.random() < 0.5 else change))
        before = nodes
    least = [np.zeros(len(cost)) for cost in costs]
    for usage in usages:
        least[usage.node] = least[usage.node] + usage.amounts
    leanest = evaluate(Problem(costs, (), usages), np.array([int(row.argmin()) for row in least])).peak
    return Problem(costs, edges, usages, float(np.floor(leanest * draw.uniform(1.05, 1.6))), f"made-{seed}")


def _node(costs: list[np.ndarray], price: np.ndarray) -> int:
    costs.append(price)
    return len(costs) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = []
    for seed in asked.seeds:
        problem = made(seed)
        for share in (0.1, 1 / 3, 1.0):
            wall, processor = time.perf_counter(), time.process_time()
            try:
                found = solve(problem, time_limit=share * asked.time_limit, overtime=0.0)
            except Exception as error:
                row = {"seed": seed, "limit": share * asked.time_limit, "error": str(error)}
            else:
                assert evaluate(problem, found.answer).feasible
                row = {"seed": seed, "nodes": len(problem.costs), "edges": len(problem.edges)}
                row |= {"limit": share * asked.time_limit, "cost": found.cost, "lower_bound": found.lower_bound}
                row |= {"gap": found.gap, "optimal": found.optimal}
                row |= {"wall": time.perf_counter() - wall, "cpu": time.process_time() - processor}
            rows.append(row)
            if not asked.json:
                print(
                    "  ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
                    flush=True,
                )
    if asked.json:
        print(json.dumps(rows))
    best = {
        seed: min((r["cost"] for r in rows if r["seed"] == seed and "cost" in r), default=np.inf)
        for seed in asked.seeds
    }
    return sum(r.get("lower_bound", 0.0) > best[r["seed"]] * (1 + 1e-9) for r in rows)  # a bound above an answer


if __name__ == "__main__":
    sys.exit(main())
