"""Models that are not Hugging Face's, as FSDP: parameters behind views of another dtype, tensors made from nothing."""

from __future__ import annotations

import pytest

from lowering.strategies import mesh_with
from runtime.test_data_dependence import built
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.verification.verify import check


def agrees(rank: int, name: str) -> None:
    model, args, kwargs, graph = built(name)
    stated = formulate(graph, mesh_with((4,)), within=restriction("fsdp", 1))
    strategy = stated.strategy(solve(stated.problem).answer)
    answer = check(model, args, kwargs, strategy, steps=2, graph=graph)
    if rank == 0:
        assert answer is not None and answer.agrees, answer.as_dict()


@pytest.mark.parametrize("name", ["fourier_mixer", "gan"])
def test_same_numbers_as_fsdp(pool, name):
    pool.run(agrees, name, seconds=100)
