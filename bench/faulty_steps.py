"""Faults in what a training step is made of: batches, passes that add up, scaled losses, recomputation, random numbers,
stages (see :mod:`mutations`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from planting import around, deep, forgetting, mutation, perceptron, pictures, words
from shardwright.lowering import collectives, randomness
from shardwright.operators.families import normalisations
from shardwright.program import Phase
from shardwright.program.instructions import REDUCE
from shardwright.runtime import (
    boundary,
    buckets,
    communication,
    computation,
    execution,
    executor,
    gradient_reduction,
    inputs,
    stage_program,
    ties,
)
from shardwright.runtime.deferred_results import ResultParts


def first_for_ever(key: Callable[..., Any]) -> Callable[..., Any]:
    """A function that goes on giving what it gave first for the same key."""
    known: dict[Any, Any] = {}

    def kept(original: Any, *args: Any, **kwargs: Any) -> Any:
        if key(*args) not in known:
            known[key(*args)] = original(*args, **kwargs)
        return known[key(*args)]

    return kept


@mutation("first batch for ever", perceptron)
def _(stack: ExitStack) -> None:
    around(stack, inputs.Arguments, "part", first_for_ever(lambda self, name, leaf: (self, name)))


@mutation("first batch for ever in a pipeline", words)
def _(stack: ExitStack) -> None:
    around(stack, boundary.Boundary, "_piece", first_for_ever(lambda self, key, part, name, given: (key, name)))


@mutation("parameters gathered once", perceptron)
def _(stack: ExitStack) -> None:
    around(stack, communication, "packed_shards", first_for_ever(lambda shards, steps: tuple(map(id, steps))))


@mutation("loss of the step before", perceptron)
def _(stack: ExitStack) -> None:
    losses: dict[str, Tensor] = {}

    def before(original: Any, self: Any, name: str, value: Tensor) -> Any:
        known, losses[name] = losses.get(name, value), value
        return original(self, name, value + (known - value).detach())

    around(stack, boundary.Boundary, "handed_out", before)


@mutation("loss scale lost", perceptron)
def _(stack: ExitStack) -> None:
    around(stack, execution.Execution, "go_back", of_one)


def of_one(original: Any, self: Any, flight: Any, arrived: Any) -> Any:
    return original(self, flight, {place: torch.ones_like(gradient) for place, gradient in arrived.items()})


@mutation("loss scale lost in a pipeline", deep)
def _(stack: ExitStack) -> None:
    around(stack, execution.Execution, "go_back", of_one)


@mutation("accumulation keeps the last pass", perceptron)
def _(stack: ExitStack) -> None:
    around(stack, gradient_reduction.GradientReduction, "_arrive", last_only)


@mutation("accumulation keeps the last micro-batch", deep)
def _(stack: ExitStack) -> None:
    def in_stages(original: Any, self: Any, instruction: Any) -> Any:
        staged = REDUCE in self.program.sections  # kept back until all micro-batches are through
        return last_only(original, self, instruction) if staged else original(self, instruction)

    around(stack, gradient_reduction.GradientReduction, "_arrive", in_stages)


def last_only(original: Any, self: Any, instruction: Any) -> Any:
    act, key = original(self, instruction), (instruction.name, instruction.node)

    def without_those_before(run: Any) -> None:
        if run.slots[instruction.reads[0]] is not None:
            self.kept_back.pop(key, None)
        act(run)

    return without_those_before


@mutation("last micro-batch dropped", deep)
def _(stack: ExitStack) -> None:
    def but_the_last(original: Any, self: Any, arrived: Any, place: int, microbatch: int) -> Any:
        one = original(self, arrived, place, microbatch)
        return one if one is None or microbatch + 1 < len(self._micro.sizes) else one * 0

    around(stack, boundary.Boundary, "arriving", but_the_last)


@mutation("first micro-batch twice", words)
def _(stack: ExitStack) -> None:
    def first(original: Any, self: Any, key: Any, *rest: Any) -> Tensor:
        stage, _ = key
        return original(self, (stage, 0), *rest)

    around(stack, boundary.Boundary, "_piece", first)


@mutation("micro-batches in another order", words)
def _(stack: ExitStack) -> None:
    def reversed_parts(original: Any, self: Any, telling: Any = None) -> Tensor:
        ways = replace(self.output, exits=self.output.exits[::-1])
        return original(self._replace(output=ways, parts=self.parts[::-1]), telling)

    around(stack, ResultParts, "whole", reversed_parts)


@mutation("tied stages not summed", words)
def _(stack: ExitStack) -> None:
    around(stack, ties.Tie, "add_up", lambda original, self, parameter, before: None)


@mutation("recomputed values off by 1 %", deep)
def _(stack: ExitStack) -> None:
    def off(original: Any, self: Any, instruction: Any, keep: bool) -> Any:
        act, result = original(self, instruction, keep), instruction.writes[0]
        if instruction.phase is not Phase.RECOMPUTE:
            return act

        def scaled(run: Any) -> None:
            act(run)
            if run.slots[result].is_floating_point():
                run.slots[result] = run.slots[result] * 1.01

        return scaled

    around(stack, computation.Computation, "forward", off)


@mutation("recomputation draws another mask", deep)
def _(stack: ExitStack) -> None:
    around(stack, computation, "set_random_state", lambda original, state, device: None)


@mutation("dropout alike in every step", forgetting)
def _(stack: ExitStack) -> None:
    around(stack, randomness, "piece_seed", lambda original, place: (original(place) * 0 + 1 + place) * 0x9E3779B9)


@mutation("whole dropout alike in every step", forgetting)
def _(stack: ExitStack) -> None:
    def seeded(original: Any, *args: Any) -> Any:
        torch.manual_seed(5)
        return original(*args)

    around(stack, executor.Executor, "forward", seeded)


@mutation("dropout does not scale", forgetting)
def _(stack: ExitStack) -> None:
    def unscaled(original: Any, self: Any, x: Tensor) -> Any:
        made = original(self, x)
        value = (made[0] if self.mask else made) * (1.0 - self.rate)
        return (value, made[1]) if self.mask else value

    around(stack, randomness.Dropout, "forward", unscaled)


@mutation("bucket not reduced", perceptron)
def _(stack: ExitStack) -> None:
    around(stack, buckets.FlatBucket, "advance", lambda original, self: None)


@mutation("gradients sent in half precision", perceptron)
def _(stack: ExitStack) -> None:
    def rounded(original: Any, self: Any, tensor: str, gradient: Tensor) -> None:
        original(self, tensor, gradient.bfloat16().to(gradient.dtype))

    around(stack, buckets.FlatBucket, "fill", rounded)


@mutation("shards in another order after a resharding", perceptron)
def _(stack: ExitStack) -> None:
    def rolled(original: Any, x: Tensor, dim: int, extent: int, *rest: Any) -> Tensor:
        return original(x, dim, extent, *rest).roll(extent // 2, dim)

    around(stack, collectives, "all_to_all", rolled)


@mutation("statistics not exchanged", pictures)
def _(stack: ExitStack) -> None:
    around(stack, normalisations, "_summed", lambda original, exchange, loops, x: x)


@mutation("buffers never updated", pictures)
def _(stack: ExitStack) -> None:
    around(stack, stage_program.StageProgram, "store", lambda original, self, values: None)
