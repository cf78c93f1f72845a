"""Every deliberate fault is noticed by what ``verify`` runs, and none is seen where there is none.

The same comparisons as ``shardwright.verify`` makes by default, in the shared pool of processes and each fault only until
it is noticed; ``python -m bench mutations`` calls ``verify`` itself (docs/benchmarks/mutations.md).
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwright.verification.forced import forced_strategies, frugal
from shardwright.verification.prepare import subject
from shardwright.verification.verify import all_agree, check, forced_mesh, mesh_of_axes, streams, truth_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from mutations import MUTATIONS, forgetting, perceptron, pictures, planted, words

MODELS = {model.__name__: model for model in (words, pictures, perceptron, forgetting)}
STEPS = 3
TELLING = ("halos", "mixed 1", "reductions", "batch")
"""Most faults show in one of these, which are tried first."""


@functools.lru_cache
def setting(name: str) -> tuple[Any, ...]:
    it = subject(MODELS[name], double=True)
    forced = dict(forced_strategies(it.graph, forced_mesh(dist.get_world_size())))
    strategies = {name: forced[name] for name in TELLING if name in forced} | forced
    return it, strategies, truth_of(it.model, it.args, it.kwargs, STEPS)


def noticed(rank: int, model: str, faults: list[str]) -> dict[str, str]:
    """For every fault the first strategy that shows it."""
    it, strategies, truth = setting(model)
    inputs, found = (it.model, it.args, it.kwargs), {}

    def wrong() -> str:
        for name, strategy in strategies.items():
            mesh = mesh_of_axes(strategy.axes)
            asked = {"graph": it.graph, "truth": truth, "priced": frugal(forced_mesh(dist.get_world_size()))}
            answer = check(*inputs, strategy, steps=STEPS, mesh=mesh, name=name, **asked)
            if not all_agree([answer] if answer is not None else []):
                return name
        looked = streams(MODELS[model], dist.get_world_size())
        return "" if all_agree(looked) else next((run.name for run in looked if not run.agrees), "random numbers")

    for fault in faults:
        with planted(fault):
            if name := wrong():
                found[fault] = name
    return found


@pytest.mark.parametrize("model", MODELS)
def test_every_fault_is_noticed(pool, model):
    faults = [fault.name for fault in MUTATIONS.values() if fault.model is MODELS[model]]
    found = pool.run(noticed, model, ["", *faults], seconds=280)[0]
    print(found)
    assert "" not in found, f"without a fault, {found['']} differs"
    assert set(found) == set(faults), set(faults) - set(found)
