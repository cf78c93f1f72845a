"""Prices that no execution undercuts: random strategies of many models against the events of their steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from program.steps import priced
from shardwright.cluster import meshes, parse_cluster
from shardwright.costs.gradient_addition import least_adding
from shardwright.costs.memory import memory
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths
from shardwright.search.bills import LEAST, Pricing
from shardwright.search.choose import Edge, evaluate, solve
from shardwright.search.formulate import formulate
from shardwright.search.formulation import Formulation
from shardwright.search.keeping import keep_gathered
from shardwright.simulator import Timeline, simulate
from shardwright.zoo.reference import resolve

UNHIDDEN = replace(LEAST, traffic=0.0)
WEIGHTS = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.5, 0.0), (0.3, 0.1, 0.6)]
"""Of computation (and what it waits for) and of the links of either axis."""
MODELS = ["gpt:small", "llama:small", "moe:small", "alexnet:small", "rnnlm:small", "hf:t5"]


def graph_of(reference: str, batch: int = 8) -> Graph:
    resolved = resolve(reference, batch=batch)
    return capture(resolved.model, resolved.args, resolved.kwargs)


def randomly(stated: Formulation, rng: np.random.Generator, share: float) -> np.ndarray:
    """A choice that is allowed: the cheapest at prices of which a ``share`` is drawn."""
    problem = stated.problem

    def scaled(values: np.ndarray) -> np.ndarray:
        finite = np.where(np.isfinite(values), values, 0.0)
        return finite / max(float(finite.max()), 1e-12)

    costs = [share * rng.random(len(cost)) + (1 - share) * scaled(cost) for cost in problem.costs]
    edges = [Edge(a, b, np.where(np.isfinite(m), 5 * (1 - share) * scaled(m), np.inf)) for a, b, m in problem.edges]
    return solve(replace(problem, costs=costs, edges=edges, usages=(), usage_limit=None), time_limit=5).answer


def kept_at_best(stated: Formulation, choice: np.ndarray) -> float:
    """What a choice costs when every shared tensor is kept where that is cheapest."""
    best, beside = choice.copy(), [[] for _ in choice]
    for a, b, matrix in stated.problem.edges:
        beside[a].append((b, matrix))
        beside[b].append((a, matrix.T))
    for number, node in enumerate(stated.nodes):
        if node.kind == "kept":
            total = stated.problem.costs[number] + sum(m[:, best[o]] for o, m in beside[number])
            best[number] = int(np.argmin(total))
    return evaluate(stated.problem, best).cost


def streams(weights: tuple[float, ...]) -> Pricing:
    return Pricing(compute=weights[0], changes=weights[0], least=True, links=weights[1:])


def unhidden_seconds(timeline: Timeline) -> float:
    """Seconds of all that computation does or waits for where it stands."""
    beside = ("gather", "scatter", "reduce")
    return sum(event.seconds for event in timeline.ranks[0].events if event.kind not in beside)


@pytest.mark.parametrize("reference", MODELS)
@pytest.mark.parametrize("recomputed", [False, True])
def test_no_execution_undercuts_the_least_prices_nor_uses_less_memory(reference: str, recomputed: bool) -> None:
    graph = graph_of(reference)
    blocks = block_paths(graph) if recomputed else ()
    if recomputed and not blocks:
        pytest.skip("nothing to recompute")
    rng = np.random.default_rng(7)
    for mesh in meshes(parse_cluster("2x2xA100-80GB"), 2)[-1:]:
        stated = formulate(graph, mesh, memory_limit=float("inf"), recompute=blocks)
        least, unhidden = stated.repriced(LEAST), stated.repriced(UNHIDDEN)
        weighed = [(weights, stated.repriced(streams(weights))) for weights in WEIGHTS]
        for share in (1.0, 0.5, 0.0):
            choice = randomly(stated, rng, share)
            strategy = stated.strategy(choice)
            for one in filter(None, (strategy, keep_gathered(graph, stated.rules, strategy, float("inf")))):
                timeline = simulate(graph, one, mesh)
                assert kept_at_best(least, choice) <= timeline.sum_seconds * (1 + 1e-9)
                assert kept_at_best(unhidden, choice) <= timeline.seconds * (1 + 1e-9)
                assert evaluate(least.problem, choice).peak <= timeline.peak_bytes
                added = sum(event.seconds for event in timeline.ranks[0].events if event.kind == "accumulate")
                assert least_adding(graph, mesh) <= added * (1 + 1e-9)
                for weights, counted in weighed:
                    busy = unhidden_seconds(timeline), *(timeline.ranks[0].load[axis.name] for axis in mesh.axes)
                    assert kept_at_best(counted, choice) <= np.dot(weights, busy) * (1 + 1e-9)
                    assert np.dot(weights, busy) <= timeline.seconds * (1 + 1e-9)


def test_what_feeds_no_loss_has_no_backward_and_costs_none() -> None:
    """Logits beside a loss: the program runs no backward for them, and neither price nor bound may count one."""
    import torch

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(512, 512), torch.nn.Linear(512, 4096)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x).sum(), self.second(x)

    with torch.device("meta"):
        graph = capture(Two(), (torch.empty(1024, 512),), {})
    mesh = meshes(parse_cluster("2xH100"), 1)[0]
    stated = formulate(graph, mesh)
    choice = solve(stated.problem).answer
    steps = priced(graph, stated.strategy(choice), mesh)
    idle = [event for event in steps.events if event.name == "linear_1" and event.phase == "backward"]
    assert not any(event.seconds for event in idle)
    assert evaluate(stated.repriced(LEAST).problem, choice).cost <= steps.seconds
    assert memory(steps.program, mesh.device).peak > 0
