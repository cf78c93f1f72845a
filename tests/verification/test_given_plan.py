"""A given plan draws its own random numbers, and is compared with dropout: one process is given what it drew."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

from shardwright.runtime import operating
from shardwright.verification.forced_pipelines import forced_pipeline
from shardwright.verification.prepare import subject
from shardwright.verification.verify import verify_rank

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from planting import deep


@functools.lru_cache
def plan():
    """Two stages whose blocks are computed again whole."""
    made, why = forced_pipeline(subject(deep, double=True).graph, 2)
    assert made is not None, why
    stages = tuple(replace(stage, strategy=replace(stage.strategy, lightly=frozenset())) for stage in made.stages)
    return replace(made, stages=stages)


def verified(rank: int, fault: bool):
    with mock.patch.object(operating, "set_random_state", **({} if fault else {"new": operating.set_random_state})):
        answer = verify_rank(deep, {True: plan()}, 2, forced=False, planned=True)
    return None if answer is None else (answer.agrees, answer.changes, answer.compared)


def test_recomputed_dropout_of_a_given_plan_is_compared(pair):
    agrees, changes, compared = pair.run(verified, False)[0]
    assert agrees and not any("dropout" in text for text in changes)
    assert any("2 operators" in text and "random numbers" in text for text in compared)
    agrees, _, _ = pair.run(verified, True)[0]
    assert not agrees
