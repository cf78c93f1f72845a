"""What a planner must never do, on random small models: give a slower plan where more is allowed.

    python bench/monotone.py [--models 500] [--first 0] [-o bench/measured/monotone.jsonl]
    python bench/monotone.py --table bench/measured/monotone.jsonl

A seed makes a model of one or two layers (linear, normalised, residual, attention, convolution, embedding) whose sizes
spread over two orders of magnitude, and a small cluster, of one or two axes. Its plan is compared with that of a recipe by
name and with two of these: under less memory, on half the devices, with links half as fast, with a random pin; each asked
for by itself as a user would (``--all``: with all of these and every recipe). ``worse`` is by how much the plan that was
allowed more is slower; above ``TOLERANCE`` it is a violation. Rows are appended as they come: an interrupted run goes on
where it stopped, and ``--first`` shares the seeds out between processes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.cluster import Cluster, parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.plans import Plan
from shardwright.search.baselines import BASELINES

TOLERANCE = 1e-6
OUTPUT = Path(__file__).parent / "measured" / "monotone.jsonl"
CLUSTERS = ("2xH100", "4xH200", "2xA100-40GB", "2x2xH100", "4xV100")


class Residual(nn.Module):
    """Add what a module makes of its input to the input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    """Self-attention over the second dim."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(b, s, w))


class Loss(nn.Module):
    """The mean square of what the layers make."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


def random_model(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A model on the meta device and its input."""
    draw = random.Random(seed)
    batch, length, width = 2 ** draw.randint(2, 8), 2 ** draw.randint(3, 9), 2 ** draw.randint(6, 12)
    dtype = draw.choice((torch.float32, torch.bfloat16))
    with torch.device("meta"):
        if draw.random() < 0.2:
            channels = [2 ** draw.randint(4, 8) for _ in range(draw.randint(2, 3))]
            image, layers = 2 ** draw.randint(3, 6), list[nn.Module]()
            for before, after in pairwise(channels):
                layers += [nn.Conv2d(before, after, draw.choice((1, 3)), padding="same"), nn.ReLU()]
            return Loss(nn.Sequential(*layers).to(dtype)), torch.empty(batch, channels[0], image, image, dtype=dtype)
        layers, start = [], width
        words = draw.random() < 0.3
        for _ in range(draw.randint(1, 2)):
            kind = draw.choice(("linear", "linear", "norm", "residual", "residual", "residual", "attention"))
            if kind == "linear":
                wide = 2 ** draw.randint(6, 13)
                layers += [nn.Linear(width, wide), nn.GELU()]
                width = wide
            elif kind == "norm":
                layers.append(nn.LayerNorm(width))
            elif kind == "residual":
                inner = 2 ** draw.randint(6, 13)
                layers.append(Residual(nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))))
            else:
                layers.append(Residual(Attention(width, max(1, width // 64))))
        if words:
            layers.insert(0, nn.Embedding(2 ** draw.randint(10, 16), start))
        model = Loss(nn.Sequential(*layers)).to(dtype)
        if words:
            return model, torch.empty(batch, length, dtype=torch.int64)
        return model, torch.empty(batch, length, start, dtype=dtype)


@dataclass(frozen=True)
class Planner:
    """Plans of one graph; ``None`` where nothing fits or a search does not apply."""

    graph: Graph

    def __call__(self, cluster: Cluster, **options: Any) -> Plan | None:
        try:
            return plan_graph(self.graph, cluster, Options(baselines=(), **options))
        except ShardwrightError:
            return None


def with_links(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with all its links so many times as fast."""
    nodes = tuple(
        replace(node, link=replace(node.link, bandwidth=factor * node.link.bandwidth)) for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes, network=replace(cluster.network, bandwidth=factor * cluster.network.bandwidth))


def halved(cluster: Cluster) -> Cluster:
    """Half its devices."""
    if len(cluster.nodes) > 1:
        return replace(cluster, nodes=cluster.nodes[: len(cluster.nodes) // 2])
    return replace(cluster, nodes=(replace(cluster.nodes[0], devices=cluster.nodes[0].devices // 2),))


def checks(seed: int, everything: bool = False) -> dict[str, Any]:
    """By how much the plan that was allowed more is slower than the one that was allowed less, per property."""
    draw = random.Random(seed + 1_000_003)
    model, example = random_model(seed)
    plan = Planner(capture(model, (example,), {}))
    name = draw.choice(CLUSTERS)
    cluster = parse_cluster(name)
    found = plan(cluster)
    row: dict[str, Any] = {"seed": seed, "cluster": name, "ops": len(plan.graph.ops), "worse": {}}
    if found is None:
        return row | {"note": "nothing fits"}
    share = draw.choice((0.95, 0.85, 0.7, 0.5))
    questions: dict[str, Callable[[], Plan | None]] = {
        f"memory x {share}": lambda: plan(cluster, memory_limit=share * found.prediction.memory_bytes),
        "half the devices": lambda: plan(halved(cluster)),
        "links half as fast": lambda: plan(with_links(cluster, 0.5)),
    }
    weights = [op.module for op in plan.graph.ops if op.module and "linear" in op.target]
    if weights:
        pinned = f"{draw.choice(weights)}={draw.choice(('n0', 'n1', 'j', 'k'))}"
        questions[f"pin {pinned}"] = lambda: plan(cluster, pins=(pinned,))
    recipes = list(BASELINES) if everything else [draw.choice(list(BASELINES))]
    for what in questions if everything else draw.sample(list(questions), 2):
        less = questions[what]()
        if less is not None:
            row["worse"][what] = found.prediction.step_seconds / less.prediction.step_seconds - 1
    for recipe in recipes:
        less = plan(cluster, search=recipe)
        if less is not None:
            row["worse"][recipe] = found.prediction.step_seconds / less.prediction.step_seconds - 1
    return row | {"step_seconds": found.prediction.step_seconds}


def table(path: Path) -> str:
    """How often each property was looked at, was violated, and how far."""
    rows = read_rows(path)
    seen: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        for what, worse in row["worse"].items():
            seen.setdefault(what if not what.startswith("pin") else "a pin", []).append((worse, row["seed"]))
    lines = [
        f"{len(rows)} models.",
        "",
        "| allowed less | compared | slower with more | worst | seeds |",
        "|---|--:|--:|--:|---|",
    ]
    for what, found in seen.items():
        bad = sorted((pair for pair in found if pair[0] > TOLERANCE), reverse=True)
        worst = f"{100 * bad[0][0]:.2f} %" if bad else "–"
        lines.append(
            f"| {what} | {len(found)} | {len(bad)} | {worst} | {', '.join(str(seed) for _, seed in bad[:6])} |"
        )
    return "\n".join(lines)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run; none where there was none yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_seeds(
    seeds: Iterable[int],
    output: Path,
    row_of: Callable[[int], dict[str, Any]],
    violations: Callable[[dict[str, Any]], dict[str, float]],
) -> None:
    """Append a row for every seed that has none yet, with the processor's seconds; show violations as they come."""
    done = {row["seed"] for row in read_rows(output)}
    for seed in seeds:
        if seed not in done:
            began = time.process_time()
            row = row_of(seed) | {"cpu": time.process_time() - began}
            with output.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(seed, row["cluster"], f"{row['cpu']:.1f} s", violations(row) or "", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="all properties and recipes of every model")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("--table", type=Path)
    asked = parser.parse_args()
    if asked.table:
        return print(table(asked.table))
    row_of = lambda seed: checks(seed, asked.all)
    violations = lambda row: {what: worse for what, worse in row["worse"].items() if worse > TOLERANCE}
    run_seeds(range(asked.first, asked.first + asked.models), asked.output, row_of, violations)
    print(table(asked.output))


if __name__ == "__main__":
    main()
