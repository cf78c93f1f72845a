"""Our own scheduler: the order of all passes of a pipeline under memory limits, with a proof of how good it is.

Known schedules that fit and several hundred list schedules are timed, the best of them improved by local search along
its longest path, small pipelines are handed to CP-SAT; it stops as soon as a bound is met. The published heuristics
collapse under tight memory and on uneven stages because they decide once; here every decision can be taken back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from math import inf

import numpy as np

from shardwright.errors import Infeasible, ProblemError
from shardwright.schedules._flat import B, F, FlatPipeline, I, Ints, W, flatten, named, numbered, run_orders
from shardwright.schedules.names import RECIPES, known_schedule
from shardwright.schedules.pipeline import Pipeline, pipeline
from shardwright.schedules.schedule import Schedule
from shardwright.schedules.v_shapes import repeated
from shardwright.search.schedule._listing import list_schedule
from shardwright.search.schedule._moves import anneal, measure
from shardwright.search.schedule.bounds import lower_bound
from shardwright.search.schedule.rules import rooms, rules
from shardwright.search.solution import Solution

OBJECTIVES = ("span", "makespan")
LEGS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (4, 4))
"""Building blocks tried on a V, slots per device down and up: from the least memory to the most."""
EFFORT, SPEED = 40_000_000, 20_000_000
"""Actions timed in one run of the local search (rounds times actions of the pipeline), and in a second, roughly."""
ROUNDS = 100_000
"""Of one run, at most."""
ANNEALING = 0.8
"""The local search's share of the time limit; small pipelines need the rest for the proof."""
TEMPERATURES = (3e-4, 1e-5, 1e-4, 3e-5)
"""Of the runs of the local search, relative to the measure."""
SMALL = 240
"""Actions up to which CP-SAT is asked."""


def find_schedule(
    problem: Pipeline, objective: str = "span", time_limit: float = 10.0, target: float = -inf, seed: int = 0
) -> Solution[Schedule]:
    """The order with the shortest longest span of a device, or the shortest makespan.

    ``time_limit`` is in seconds of this process's processor time, compilation not counted; a cost of at most
    ``target`` is good enough. Micro-batches keep their order within every pass of a stage.

    >>> from shardwright.schedules import pipeline
    >>> found = find_schedule(pipeline(range(4), 12, 5, 6, 4, forward_memory=2, inputs_memory=-1, limits=10))
    >>> found.cost, found.lower_bound, found.optimal
    (193.0, 193.0, True)
    """
    if objective not in OBJECTIVES:
        raise ProblemError(f"there is no objective {objective!r}.", f"Objectives are {' and '.join(OBJECTIVES)}.")
    _check_memory(problem)
    _compile()
    began = _clock()
    bound = lower_bound(problem, objective)
    search = _Search(problem, objective == "makespan", bound, target)
    for numbers in _starts(problem, search):
        search.offer(numbers)
        if search.enough or _clock() - began > time_limit:
            break
    for run, temperature in enumerate(TEMPERATURES):
        left = ANNEALING * time_limit - (_clock() - began)
        if search.enough or left <= 0:
            break
        search.improve(temperature, left, seed + run)
    left = time_limit - (_clock() - began)
    if not search.enough and len(search.best) <= SMALL and left > 0:
        search.prove(left)
    answer = named(search.best, search.begins, problem.stages, problem.microbatches)
    return Solution(answer, search.cost, min(search.bound, search.cost), search.met, _clock() - began)


_clock = time.process_time


@cache
def _compile() -> None:
    """Compile (or load) the kernels on the smallest pipeline, so that the first search does not pay for it."""
    smallest = pipeline((0,), 1)
    search = _Search(smallest, False, 0.0, -inf)
    for numbers in _starts(smallest, search):
        search.offer(numbers)
    search.improve(0.0, 0.0, 0)


class _Search:
    """The best order so far, its cost and the bound."""

    def __init__(self, pipeline: Pipeline, makespan: bool, bound: float, target: float) -> None:
        self.flat: FlatPipeline = flatten(pipeline)
        self.makespan, self.bound, self.target = makespan, bound, target
        counts = 3 * pipeline.microbatches * np.bincount(self.flat.device, minlength=pipeline.devices)
        self.begins: Ints = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.cost, self.best = inf, np.empty(0, np.int64)
        self._done = np.empty_like(self.flat.seconds)
        self._starts = np.empty(int(self.begins[-1]))

    @property
    def met(self) -> bool:
        return self.cost <= self.bound * (1 + 1e-12)

    @property
    def enough(self) -> bool:
        return self.met or self.cost <= self.target

    def offer(self, numbers: Ints) -> None:
        """Keep an order if it can run, keeps the limits and is better."""
        if not self._holds(numbers):
            return
        if run_orders(self.flat, numbers, self.begins, self._done, self._starts) < len(numbers):
            return
        cost, _, _ = measure(self.flat, numbers, self.begins, self._starts, self.makespan)
        if cost < self.cost:
            self.cost, self.best = float(cost), numbers.copy()

    def _holds(self, numbers: Ints) -> bool:
        changes = self.flat.memory.reshape(-1)[numbers]
        for device, (low, high) in enumerate(zip(self.begins[:-1], self.begins[1:], strict=True)):
            if high > low and np.cumsum(changes[low:high]).max() > self.flat.limit[device]:
                return False
        return True

    def improve(self, temperature: float, seconds: float, seed: int) -> None:
        """One run of the local search from the best order."""
        numbers = self.best.copy()
        rounds = min(int(min(EFFORT, SPEED * seconds)) // len(numbers) + 1, ROUNDS)
        target = max(self.bound * (1 + 1e-12), self.target)
        anneal(self.flat, numbers, self.begins, rounds, temperature * self.cost, target, self.makespan, seed)
        self.offer(numbers)

    def prove(self, seconds: float) -> None:
        """Ask CP-SAT for a better order and a better bound."""
        from shardwright.search.schedule.exact import solve_exactly

        run_orders(self.flat, self.best, self.begins, self._done, self._starts)
        numbers, bound = solve_exactly(
            self.flat, self.best, self.begins, self._starts, self.makespan, self.bound, seconds
        )
        self.offer(numbers)
        self.bound = min(bound, self.cost)


def _starts(pipeline: Pipeline, search: _Search) -> Iterator[Ints]:
    """One micro-batch after the other (always possible), the known schedules on these devices, and the list
    schedules.
    """
    yield _one_by_one(pipeline, search.begins)
    for schedule in _known(pipeline):
        yield _split(schedule, pipeline)
    room = rooms(pipeline)
    numbers = np.empty(int(search.begins[-1]), np.int64)
    for rule in rules(pipeline):
        if list_schedule(search.flat, room, rule, numbers, search.begins):
            yield numbers


def _known(pipeline: Pipeline) -> Iterator[Schedule]:
    """Known schedules that keep micro-batches in order, on the same devices."""
    for name in sorted(RECIPES.keys() - {"gpipe", "breadth-first"}):
        try:
            schedule = known_schedule(name, pipeline.stages, pipeline.microbatches, pipeline.devices)
        except ProblemError:
            continue  # made of another number of stages per device
        if schedule.device_of == pipeline.device_of:
            yield schedule
    if pipeline.device_of == (*range(pipeline.devices), *reversed(range(pipeline.devices))):
        for down, up in LEGS:
            for early in (False, True):
                yield repeated(pipeline.devices, pipeline.microbatches, (down, up, down, up), early)


def _split(schedule: Schedule, pipeline: Pipeline) -> Ints:
    """A schedule as numbers, whole backward passes as input and weight."""
    numbers, _ = numbered(schedule)
    size = pipeline.stages * pipeline.microbatches
    whole = numbers // size == B
    pairs = np.where(
        whole[:, None], np.stack([numbers - (B - I) * size, numbers - (B - W) * size], axis=1), numbers[:, None]
    )
    once = np.ones_like(pairs, bool)
    once[:, 1] = whole
    return pairs[once]


def _one_by_one(pipeline: Pipeline, begins: Ints) -> Ints:
    """All passes of a micro-batch, then the next: as little memory as possible."""
    size, m = pipeline.stages * pipeline.microbatches, pipeline.microbatches
    numbers = np.empty(int(begins[-1]), np.int64)
    for device in range(pipeline.devices):
        mine = pipeline.stages_of(device)
        order = []
        for i in range(m):
            order += [F * size + stage * m + i for stage in mine]
            for stage in reversed(mine):
                order += [I * size + stage * m + i, W * size + stage * m + i]
        numbers[begins[device] : begins[device + 1]] = order
    return numbers


def _check_memory(pipeline: Pipeline) -> None:
    """On its way to the loss a micro-batch is held by every stage of a device at once."""
    for device, limit in enumerate(pipeline.limits):
        least = float(pipeline.forward_memory[list(pipeline.stages_of(device))].sum(axis=0).max())
        if least > limit:
            raise Infeasible(
                f"device {device} may hold {limit:g}, but one micro-batch alone takes {least:g} there.",
                f"Allow {least:g}, take smaller micro-batches, or recompute activations.",
            )
