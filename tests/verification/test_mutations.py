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

from shardwright.verification.batches import shortened
from shardwright.verification.forced import frugal
from shardwright.verification.prepare import subject
from shardwright.verification.verify import (
    PASSES,
    PIPELINE,
    all_agree,
    check,
    forced_mesh,
    forced_on,
    streams,
    truth_of,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from mutations import MUTATIONS, deep, forgetting, perceptron, pictures, planted, words

MODELS = {model.__name__: model for model in (words, pictures, perceptron, forgetting, deep)}
STEPS = 3
TELLING = ("halos", "mixed 1", "reductions", "batch")
"""Most faults show in one of these, which are tried first."""
STAGED = ("pipeline", "micro-batch", "stages")
"""Words of faults that show in a pipeline alone."""


@functools.lru_cache
def setting(name: str) -> tuple[Any, ...]:
    it = subject(MODELS[name], double=True)
    forced = dict(forced_on(it, dist.get_world_size())[0])
    strategies = {name: forced[name] for name in TELLING if name in forced} | forced
    steps = it.steps(STEPS)
    own = it.shown is None
    return (
        it,
        strategies,
        steps,
        functools.cache(lambda few: truth_of(it.model, shortened(steps, few)) if own else None),
    )


def noticed(rank: int, model: str, faults: list[str]) -> dict[str, str]:
    """For every fault the first strategy that shows it."""
    it, strategies, steps, truth = setting(model)
    inputs, found = (it.model, it.args, it.kwargs), {}

    def wrong(fault: str) -> str:
        ordered = sorted(strategies, key=lambda name: name == PIPELINE, reverse=any(word in fault for word in STAGED))
        for name, strategy in ((name, strategies[name]) for name in ordered):
            staged = name == PIPELINE
            few = PASSES.get(name, "one")
            asked = {"graph": it.graph, "shown": it.shown, "name": name}
            asked |= {"truth": truth(few), "steps": shortened(steps, few)}
            if not staged:
                asked |= {"priced": frugal(forced_mesh(dist.get_world_size()))}
            answer = check(*inputs, strategy, **asked)
            if not all_agree([answer] if answer is not None else []):
                return name
        looked = streams(MODELS[model], dist.get_world_size())
        return "" if all_agree(looked) else next((run.name for run in looked if not run.agrees), "random numbers")

    for fault in faults:
        with planted(fault):
            if name := wrong(fault):
                found[fault] = name
    return found


@pytest.mark.parametrize("model", MODELS)
def test_every_fault_is_noticed(pool, model):
    faults = [fault.name for fault in MUTATIONS.values() if fault.model is MODELS[model]]
    found = pool.run(noticed, model, ["", *faults], seconds=280)[0]
    print(found)
    assert "" not in found, f"without a fault, {found['']} differs"
    assert set(found) == set(faults), set(faults) - set(found)
