"""Uneven cuts by weight: loops are cut in the shares of their axis, and the numbers are those of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowering.strategies import mesh_with
from runtime.pool import Pool
from runtime.workers import built, two_residual_blocks
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.errors import PlanError
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.program.pipeline import Pipeline
from shardwright.program.validate import validate
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.verification.verify import check


def agrees(rank: int, reference: str, search: str, shares: tuple[float, ...]) -> bool:
    model, args, kwargs, graph = built(reference) if reference else two_residual_blocks()
    mesh = mesh_with((2,))
    stated = formulate(graph, mesh, within=restriction(search, 1))
    strategy = replace(stated.strategy(solve(stated.problem).answer), shares={"a": shares})
    plan = Plan.of(graph, strategy)
    validate(Pipeline.of(graph, plan.stages, 1, plan.schedule), [PricedDecisions(mesh.with_shares(strategy.shares))])
    answer = check(model, args, kwargs, strategy, steps=2, graph=graph)
    return answer is None or answer.agrees


@pytest.mark.parametrize("shares", [(0.75, 0.25), (0.625, 0.375)], ids=["3:1", "5:3"])
@pytest.mark.parametrize("model", ["gpt:small,batch=8", ""], ids=["gpt", "residual blocks"])
def test_a_batch_in_shares(pair: Pool, model: str, shares: tuple[float, ...]) -> None:
    assert all(pair.run(agrees, model, "data-parallel", shares))


def test_shares_that_do_not_fit_their_axis_are_refused() -> None:
    for shares in ((0.5,), (0.5, 0.6), (1.5, -0.5)):
        with pytest.raises(PlanError, match="do not fit the mesh"):
            Strategy((("a", 2),), {}, {}, shares={"a": shares})


def test_a_batch_in_shares_with_parameters_in_equal_parts(pair: Pool) -> None:
    """Parameters rest as DTensors have them, whoever has how many rows, and are gathered for use."""
    assert all(pair.run(agrees, "gpt:small,batch=8", "fsdp", (0.75, 0.25)))


def test_weights_in_shares(pair: Pool) -> None:
    """What is used cut along the axis rests in its shares: heads three to one, and everything else alike."""
    assert all(pair.run(agrees, "gpt:small,heads=4", "megatron", (0.75, 0.25)))
