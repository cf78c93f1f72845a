"""Whether anything that can be asked for is faster than what is found unasked, and whether any plan lies below a bound.

    python bench/bounds.py [--models 60] [--first 0] [-o bench/measured/robustness/bounds.jsonl]
    python bench/bounds.py --table bench/measured/robustness/bounds.jsonl

A seed makes a model (a language model with tied or untied words, two unlike towers, convolutions, an MLP; sizes spread over
two orders of magnitude), a cluster (one node or several, a slow network, unlike nodes) and, for every second one, a memory
limit below what the free plan uses. Beside the plan found unasked stand recipes by name, another search, forced
recomputation, ``max_axes=1`` and a pin: each restricts, so none may be faster (``faster``, by which share; above
``TOLERANCE`` it is a violation), and no sum or step of any of them may lie below what was proved (``below``). Pipelines made
by hand are another space and are reported apart. Rows are appended as they come: a run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from monotone import Attention, Loss, Residual, read_rows, run_seeds
from shardwright.cluster import Cluster, parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, Pipelining, plan_graph, plan_jointly, plan_pipeline
from shardwright.plans import Plan
from shardwright.plans.proof import STEP
from shardwright.plans.proof_text import warnings_text
from shardwright.search.baselines import BASELINES

TOLERANCE, ROUNDING = 1e-3, 1e-9
OUTPUT = Path(__file__).parent / "measured" / "robustness" / "bounds.jsonl"
SLOW = "2x2xA100-40GB over 10 GbE"
CLUSTERS = ("4xH200", "2x2xA100-40GB", "2xH100", "2x2xH100", "4xV100", SLOW, "2xA100-40GB+2xH100", "8xA100-40GB")
SEARCHES = ("recursive", "spartan", "integer")
PIPELINES = ((2, 4, "1f1b"), (2, 2, "gpipe"), (2, 8, "auto"), (4, 8, "zb-h1"), (1, 4, "auto"))


class Feedforward(nn.Module):
    """Two layers, the inner one gated or not."""

    def __init__(self, width: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.gate = nn.Linear(width, inner) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(x))
        return self.down(inner if self.gate is None else inner * self.gate(x))


class LanguageModel(nn.Module):
    """Blocks of attention and two layers between words and words; the loss passes over some labels."""

    def __init__(self, words: int, width: int, blocks: int, inner: int, gated: bool, tied: bool) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, max(1, width // 64)))),
                Residual(nn.Sequential(nn.LayerNorm(width), Feedforward(width, inner, gated))),
            )
            for _ in range(blocks)
        )
        if tied:
            self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


class Towers(nn.Module):
    """Two towers of unlike widths and depths that meet in one layer."""

    def __init__(self, left: int, right: int, width: int, depths: tuple[int, int]) -> None:
        super().__init__()
        first = [m for _ in range(depths[0]) for m in (nn.ReLU(), nn.Linear(width, width))]
        second = [m for _ in range(depths[1]) for m in (nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width))]
        self.left = nn.Sequential(nn.Linear(left, width), *first)
        self.right = nn.Sequential(nn.Linear(right, width), *second)
        self.both = nn.Linear(2 * width, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.both(torch.cat([self.left(x), self.right(y)], -1)).float().square().mean()


class Classifier(nn.Module):
    """Residual convolutions, with or without batch norm, and a layer over their mean."""

    def __init__(self, channels: int, depth: int, normed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(channels, 1000)
        norm = nn.BatchNorm2d if normed else nn.Identity
        layers = (
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), norm(channels), nn.ReLU()) for _ in range(depth)
        )
        self.layers = nn.Sequential(*map(Residual, layers))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.last(self.layers(self.first(x)).mean((2, 3))).float(), labels)


def random_problem(seed: int, small: bool = False) -> tuple[str, nn.Module, tuple[torch.Tensor, ...], str]:
    """A model with its name and example, and a cluster; ``small``: only towers and MLPs, planned quickly."""
    draw = random.Random(seed + 2_000_003)
    power = lambda low, high: 2 ** draw.randint(low, high)
    dtype, batch = draw.choice((torch.float32, torch.bfloat16)), power(3, 6)
    kind = draw.choice(("towers", "mlp") if small else ("words", "words", "words", "towers", "images", "mlp"))
    cluster = CLUSTERS[seed % len(CLUSTERS)]
    with torch.device("meta"):
        if kind == "words":
            width, length, words, blocks = power(7, 11), power(5, 9), power(9, 16), draw.choice((1, 1, 2))
            model: nn.Module = LanguageModel(
                words, width, blocks, width * draw.choice((1, 4)), draw.random() < 0.5, draw.random() < 0.5
            )
            tokens = torch.empty(batch, length, dtype=torch.long)
            return (
                f"{kind} {words}, width {width}, {batch} x {length}",
                model.to(dtype),
                (tokens, tokens.clone()),
                cluster,
            )
        if kind == "images":
            channels, size, depth = power(5, 9), power(4, 7), draw.randint(2, 4)
            model = Classifier(channels, depth, draw.random() < 0.5).to(dtype)
            example = torch.empty(batch, 3, size, size, dtype=dtype), torch.empty(batch, dtype=torch.long)
            return f"{kind} {size}, {channels} channels, {batch}", model, example, cluster
        batch *= power(0, 8)
        if kind == "towers":
            left, right, width = power(6, 12), power(6, 12), power(7, 12)
            model = Towers(left, right, width, (draw.randint(1, 2), draw.randint(1, 2))).to(dtype)
            example = torch.empty(batch, left, dtype=dtype), torch.empty(batch, right, dtype=dtype)
            return f"{kind} {left} and {right}, width {width}, {batch}", model, example, cluster
        width, inner, depth = power(7, 12), power(8, 14), draw.randint(1, 3)
        layers = [
            m for _ in range(depth) for m in (nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width), nn.Tanh())
        ]
        model = Loss(nn.Sequential(*layers)).to(dtype)
        return f"{kind} {width} to {inner}, {batch}", model, (torch.empty(batch, width, dtype=dtype),), cluster


def cluster_of(name: str) -> Cluster:
    if name != SLOW:
        return parse_cluster(name)
    plain = parse_cluster(name.partition(" ")[0])
    nodes = tuple(replace(node, link=replace(node.link, latency=1e-5, bandwidth=11e9)) for node in plain.nodes)
    return replace(plain, nodes=nodes, network=replace(plain.network, latency=3e-5, bandwidth=1.2e9))


def restricted(
    graph: Graph, cluster: Cluster, limit: float | None, draw: random.Random
) -> dict[str, Callable[[], Plan]]:
    """Questions that allow less than the one nobody restricts."""

    def asked(**options: Any) -> Callable[[], Plan]:
        return lambda: plan_graph(graph, cluster, Options(baselines=(), memory_limit=limit, **options))

    found = {name: asked(search=name) for name in draw.sample([*BASELINES], 4)}
    found["max_axes=1"] = asked(max_axes=1)
    found |= {f"search {name}": asked(search=name) for name in draw.sample(SEARCHES, 1)}
    ways = ("light", "blocks")
    found |= {f"recompute {way}": asked(recompute=way) for way in (ways if limit else draw.sample(ways, 1))}
    weights = sorted({op.module for op in graph.ops if op.module and "linear" in op.target})
    if weights:
        pin = f"{draw.choice(weights)}.weight={draw.choice(('S0', 'S1', 'R'))}"
        found[f"pin {pin}"] = asked(pins=(pin,))
    return found


def checks(seed: int, small: bool = False) -> dict[str, Any]:
    """The plan of a problem beside all that was asked for."""
    name, model, example, where = random_problem(seed, small)
    row: dict[str, Any] = {"seed": seed, "model": name, "cluster": where}
    draw = random.Random(seed + 3_000_017)
    graph, cluster = capture(model, example, {}), cluster_of(where)

    def unasked(limit: float | None) -> Plan | None:
        options = Options(baselines=(), memory_limit=limit)
        return _answer(lambda: plan_jointly(graph, cluster, options, pipelines="promising")[0])

    found, limit = unasked(None), None
    if found is not None and draw.random() < 0.5:
        limit = draw.choice((0.95, 0.8, 0.6, 0.45)) * found.prediction.memory_bytes
        found = unasked(limit)
    row |= {"limit": limit, "compared": [], "faster": {}, "below": {}, "pipelines": {}, "dropped": [], "spoken_of": 0}
    questions = restricted(graph, cluster, limit, draw)
    if found is None:  # then nothing that restricts may fit either
        answers = {what: _answer(question) for what, question in questions.items()}
        lost = {what: 1.0 for what, plan in answers.items() if plan is not None and plan.prediction.fits}
        return row | {"note": "nothing fits", "compared": list(answers), "faster": lost}
    proof, p = found.proof, found.prediction
    row |= {"step": p.step_seconds, "step_bound": proof.step_bound, "sum_bound": proof.sum_bound}
    row |= {"stages": len(found.stages), "note": ""}
    row["dropped"] = warnings_text(found)

    def looked_at(what: str, plan: Plan) -> None:
        seconds, summed = plan.prediction.step_seconds, plan.prediction.sum_seconds
        row["compared"].append(what)
        if seconds < p.step_seconds * (1 - ROUNDING):
            row["faster"][what] = 1 - seconds / p.step_seconds
        for bound in proof.bounds:
            value = seconds if bound.quantity == STEP else summed
            inside = bound.space.contains(plan)
            row["spoken_of"] += inside
            if inside and value < bound.value * (1 - ROUNDING):
                row["below"][f"{bound.quantity} of {what}"] = 1 - value / bound.value

    if found.whole:
        looked_at("the plan itself", found)
    for what, question in questions.items():
        if (plan := _answer(question)) is not None and plan.prediction.fits:
            looked_at(what, plan)
    for how in () if small or "+" in where else draw.sample(PIPELINES, 1):
        pipelined = partial(plan_pipeline, graph, cluster, Pipelining(*how), Options(baselines=(), memory_limit=limit))
        if (plan := _answer(pipelined)) is not None and plan.prediction.fits:
            row["pipelines"]["stages {}, micro-batches {}, {}".format(*how)] = (
                1 - plan.prediction.step_seconds / p.step_seconds
            )
    return row


def _answer(question: Callable[[], Plan]) -> Plan | None:
    try:
        return question()
    except ShardwrightError:  # it does not apply, or does not fit
        return None


def violations(row: dict[str, Any]) -> dict[str, float]:
    """What is faster than the plan by more than the tolerance, and what lies below a bound."""
    faster = {what: share for what, share in row.get("faster", {}).items() if share > TOLERANCE}
    return {**faster, **{f"below the bound: {what}": share for what, share in row.get("below", {}).items()}}


def table(path: Path) -> str:
    """How many comparisons there were, and every violation."""
    rows = read_rows(path)
    planned = [row for row in rows if "step" in row]
    compared = sum(len(row.get("compared", ())) for row in rows)
    gaps = sorted(row["step"] / row["step_bound"] - 1 for row in planned if row["step_bound"])
    quicker = {row["seed"]: max(row["pipelines"].values(), default=0.0) for row in planned}
    lines = [
        f"{len(rows)} problems, {len(planned)} with a plan, {compared} comparisons; median gap of the step "
        f"{100 * gaps[len(gaps) // 2]:.1f} %; {sum(bool(row['dropped']) for row in planned)} bounds dropped.",
        f"Faster by more than {100 * TOLERANCE:g} %, fitting where nothing was found, or below a bound: "
        f"{sum(len(violations(row)) for row in rows)}.",
    ]
    lines += [
        f"- seed {row['seed']} ({row['model']}, {row['cluster']}): {what}, {100 * share:.2f} %"
        for row in rows
        for what, share in violations(row).items()
    ]
    lines += [
        f"Pipelines made by hand are faster in {sum(share > TOLERANCE for share in quicker.values())}:",
        *(f"- seed {seed}: {100 * share:.0f} %" for seed, share in quicker.items() if share > TOLERANCE),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("--table", type=Path)
    asked = parser.parse_args()
    if asked.table:
        return print(table(asked.table))
    run_seeds(range(asked.first, asked.first + asked.models), asked.output, checks, violations)
    print(table(asked.output))


if __name__ == "__main__":
    main()
