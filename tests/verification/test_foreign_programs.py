"""Parallel code as people write it: silent where it is right, the mistake named where it is wrong.

A part of ``python -m bench foreign_faults`` (all programs and faults, in processes of their own), in the shared pool.
"""

from __future__ import annotations

import functools
import pickle
import sys
from pathlib import Path

import pytest

from shardwright.verification.candidates.checking import Checked, Question, asked_of, judged_ranks, observe_rank
from shardwright.verification.candidates.observing import Seen

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from foreign_programs import FAULTS, PROGRAMS, Program

SOUND = (
    "DDP, uneven labels, 2 micro-batches, clipping",
    "hybrid shard",
    "FSDP2 and tensor parallelism",
    "Megatron by hand, sequence parallelism",
    "Megatron by hand, dropout",
    "ZeRO by hand, flat shards, a checkpoint",
    "1F1B with tied weights",
)
FAULTY = (
    "loss averaged over ranks with uneven labels",
    "batch norm of own rows",
    "accumulation not divided",
    "stale micro-batch",
    "clipping by the local norm",
    "shards exchanged by a checkpoint",
    "optimizer state of another shard",
    "no sum behind a row-parallel layer",
    "no sum on the way back through a column-parallel layer",
    "norms not reduced under sequence parallelism",
    "dropout alike on tensor-parallel ranks",
    "dropout differing where replicated",
    "tied weights in a pipeline",
)


@functools.lru_cache
def question(model) -> Question:
    return asked_of(model, 2)


def seen(rank: int, name: str, batches: bytes, drops: bool) -> Seen:
    program = {**PROGRAMS, **FAULTS}[name]
    return observe_rank(program.model, program.build, batches, drops)


def checked(request: pytest.FixtureRequest, name: str, program: Program) -> Checked:
    pool = request.getfixturevalue("pair" if program.processes == 2 else "pool")
    asked = question(program.model)
    ranks = pool.run(seen, name, pickle.dumps(asked.steps), asked.drops)
    return judged_ranks(asked, ranks)


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_correct_programs(request, name):
    answer = checked(request, name, PROGRAMS[name])
    assert answer.agrees, answer.sentences()
    kinds = {item.what for item in answer.verification.comparisons}
    assert {"loss", "gradient", "parameter", "update", "copy"} <= kinds
    assert ("stream" in kinds) == ("dropout" in name)


@pytest.mark.parametrize("name", FAULTY)
def test_mistakes_are_noticed_and_named(request, name):
    answer = checked(request, name, FAULTS[name])
    assert not answer.agrees
    assert answer.findings[0].cause == FAULTS[name].cause, answer.sentences()
    assert len(answer.findings[0].sentence) > 40
